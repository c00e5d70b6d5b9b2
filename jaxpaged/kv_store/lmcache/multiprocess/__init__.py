"""LMCache's multi-process server: spoken over gRPC, with chunks in memory that it shares, and no pickles.

`lmcache_mp.proto` has what is asked, `calls.py` asks it, `pool.py` reads and writes the memory, `leases.py` keeps what
was found from being evicted before it is read, and `store.py` is the store of chunks. Beside them is what vLLM's
connector for it is told (`settings.py`).
"""
