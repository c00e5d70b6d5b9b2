"""The parts of `scripts/bench_offline.py`, one idea a module. Nothing here imports an engine, except in `engines/`.

`engines/` holds the programs that run in each engine's own process, possibly with another Python: they know their
engine and the lines that go to and fro, and nothing else of this package.
"""
