"""Tests that leave a ring as they found it, or do not care how they found it: one serves all of them."""
