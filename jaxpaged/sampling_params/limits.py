"""How much one request may ask for. Counts of ids and words are places that arrays on the device have for them.

This module knows nothing but numbers.
"""

MAX_N = 16384
MAX_REPETITION_PENALTY = 1e6
"""Logits times or divided by this are float32 numbers yet; so they are with its inverse."""
MAX_LENGTH_PENALTY = 50.0
"""A million tokens to this power, or its inverse, is a number yet."""
MAX_EXTRA_VALUES = 4096
"""Of `extra_args`, those inside lists and dicts included."""
MAX_LOGIT_BIAS_IDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_TOP_K_WITH_MASK = 2048
"""Where tokens are told with those that might have been drawn in their place."""
MAX_MASKED_STOP_IDS = 128
"""Most stop ids, the end-of-sequence id included, of a request with `min_tokens`."""
MAX_STOPS = 128
MAX_STOP_CHARACTERS = 1024
"""Of one stop text: new text is searched for all of them, and as much of it is held back."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 128
MAX_BAD_WORD_CHARACTERS = 1024
"""Longer ones are refused before they are cut into tokens."""
MAX_BAD_WORD_TOKENS = 1024
"""All bad words of a request together, in tokens."""
