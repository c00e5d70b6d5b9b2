"""LoRA adapters in PEFT's folders: what they say, which matrices of a model they change, and the arrays for that."""
