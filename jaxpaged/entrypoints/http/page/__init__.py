"""The page at `/`: a playground, and the engine while it works. Its files lie in `static/` and are served as they are.

The page uses the API like any other client; only what it shows of the engine has endpoints of its own (`live.py`).
"""
