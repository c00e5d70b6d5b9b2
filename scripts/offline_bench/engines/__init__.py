"""Programs that each run one engine in a process of its own. They are started by path, with the engine's own Python.

They must work with the Python of every peer, 3.11 at the oldest, and may import only the standard library, their
engine, and `session`, which is beside them.
"""
