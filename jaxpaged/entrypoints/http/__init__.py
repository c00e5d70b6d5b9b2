"""The HTTP server: one ASGI application over an asynchronous engine, and the process that listens.

To follow a request: `app.py` has its path, `routes.py` of its API names its stages, and `generation/stages.py` goes
through them: the structs of `protocol`, `parse`, `generate`, `write`. Nothing below knows schedulers or devices; what
it needs of an engine is in `engine_client.py`.
"""
