"""The device side: weights, KV blocks, compiled programs, and the step that uses them."""
