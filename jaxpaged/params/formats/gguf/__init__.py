"""GGUF files, as llama.cpp writes them: a header of facts and tensors, and blocks of quantised weights."""
