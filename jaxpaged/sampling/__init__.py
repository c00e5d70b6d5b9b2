"""From logits to tokens: pure functions of fixed shapes, traced inside the programs of `worker/step/functions.py`.

    rows.py      what a step must know of each row that samples: one packed float32 array, host and device side
    state.py     what stays on the device per row: counts, biases, masks; only the full program reads it
    logits.py    bias, allowed tokens, min_tokens, penalties, bad words
    custom.py    logits processors of the user
    limits.py    the least logit that may be drawn
    noise.py     randomness from (seed, position, token id) alone
    logprobs.py  log probabilities and ranks
    sampler.py   the two programs, plain and full, that put these together

Nothing here knows requests, schedulers or models.
"""
