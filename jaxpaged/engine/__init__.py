"""The engine: text in, text out, one step at a time."""
