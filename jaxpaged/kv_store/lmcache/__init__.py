"""LMCache's stores as tiers: its keys, its layout of keys and values, and the servers that hold them.

Spoken from outside: nothing of LMCache is imported, nor torch, and nothing that is pickled is read or written.
"""
