"""Anthropic's API, `/v1/messages`: its bodies, blocks, events and errors around the same engine."""
