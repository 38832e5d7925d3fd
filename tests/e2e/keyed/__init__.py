"""Tests on a ring that wants a key: one serves all of them."""

KEY = "a-key-that-is-long-enough"
