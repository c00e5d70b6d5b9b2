"""The folder of a model that is a GGUF file: what the file says, as config.json, tokenizer.json and others say it.

Engines read folders. For a file one is made, in the cache, with everything but the matrices, which stay where they are:
`folder.make_folder`. Knows the names of facts, tensors and architectures, and no mathematics.
"""
