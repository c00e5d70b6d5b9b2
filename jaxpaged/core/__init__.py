"""The scheduler and its bookkeeping of KV blocks, in plain Python: nothing below this package imports jax.

Read `scheduler.py` first, then `kv_cache/manager.py`, then `kv_cache/block_pool.py`.
"""
