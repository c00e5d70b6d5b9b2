"""The HTTP server: one ASGI application over an asynchronous engine, and the process that listens.

Nothing below knows schedulers or devices; what it needs of an engine is in `engine_client.py`.
"""
