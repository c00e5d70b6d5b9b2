"""What a model wrote, told apart while it is being written: content, reasoning, tool calls.

`parser.py` is the door: `make_parser` by the names that vLLM's users know. Pure Python over text; nothing here knows
tokens, requests or HTTP, and nothing that a model writes is ever executed.
"""
