"""Pages whose commands go to the server that README and quickstart start: one serves all of them."""
