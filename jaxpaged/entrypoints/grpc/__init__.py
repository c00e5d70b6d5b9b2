"""The engine over gRPC, beside HTTP or alone.

Requests become those of the HTTP server, so that every field is checked in one place, and meet the same engine, the
same limits and the same count of what is under way.
"""
