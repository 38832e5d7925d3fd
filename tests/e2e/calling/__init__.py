"""Tests of tool calls and of shapes of answers: one ring serves all of them, whose model can call tools."""
