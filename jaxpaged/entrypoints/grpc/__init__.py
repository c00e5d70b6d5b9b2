"""The engine over gRPC, beside HTTP or alone.

Requests become those of `serving`, as those of HTTP do: every field is checked in one place, and they meet the same
engine, the same limits and the same count of what is under way.
"""
