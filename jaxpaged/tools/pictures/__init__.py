"""Pictures of what an engine did: the timeline of its steps, and the map of its KV blocks."""
