"""Attention over paged memory, and what it takes to test it. Needs jax and numpy; knows nothing of any engine."""
