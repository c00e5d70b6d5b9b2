"""Faces of the engine: offline batches, command line, servers."""
