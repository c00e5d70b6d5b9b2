"""Which KV blocks exist, who holds them, and what is found in them again."""
