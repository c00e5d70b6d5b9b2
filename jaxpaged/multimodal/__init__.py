"""Pictures before they reach the engine: fetched, decoded, resized, counted in tokens and named.

Host side only: Pillow and numpy, no jax. What leaves this package is uint8, and the encoder program normalises it.
Nothing here knows of requests, schedulers or caches.
"""
