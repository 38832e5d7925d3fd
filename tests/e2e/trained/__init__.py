"""Tests of trainers, each on a policy of its own: one ring serves all of them."""
