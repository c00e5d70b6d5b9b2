"""Requests whose result is a vector: their prompts, their state, and what becomes of the numbers."""
