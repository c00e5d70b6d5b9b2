"""Sampling by its definition, in plain numpy, one row at a time: what the sampler's programs must equal."""

import numpy as np

from jaxpaged.sampling_params import SamplingParams

NINF = np.float32(-np.inf)


def edited_logits(logits_V: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Logits before the temperature, step by step in the order of vLLM's second model runner."""
    logits = logits_V.astype(np.float32).copy()
    if params.allowed_token_ids is not None:
        logits[[v for v in range(len(logits)) if v not in params.allowed_token_ids]] = NINF
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += np.float32(bias)
    if len(output) < params.min_tokens:
        logits[params.stop_token_ids] = NINF
    for token in {*prompt, *output}:
        factor = np.float32(params.repetition_penalty)
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        logits[token] -= np.float32(params.presence_penalty)
    for word in params.bad_words_token_ids or []:
        *before, last = word
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            logits[last] = NINF
    return logits


def processed_logits(edited_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, then min_p, then top_k, then top_p; a greedy row stops before the temperature."""
    if params.greedy:
        return edited_V
    logits = edited_V / np.float32(params.temperature)
    relative = np.exp(logits - logits.max())
    if params.min_p > 0:
        logits = np.where(relative >= params.min_p, logits, NINF)
    if 0 < params.top_k < len(logits):
        logits = np.where(logits >= np.sort(logits)[-params.top_k], logits, NINF)
    if params.top_p < 1:
        weights = np.exp(logits.astype(np.float64) - logits.max())
        weights /= weights.sum()
        above = np.array([weights[logits > value].sum() for value in logits])
        logits = np.where(above < params.top_p, logits, NINF)
    return logits


def drawn_token(processed_V: np.ndarray, params: SamplingParams, position: int) -> int:
    """The largest logit plus Gumbel noise; without the noise when greedy."""
    if params.greedy:
        return int(processed_V.argmax())
    words_V = random_words(params.seed, position, len(processed_V))
    exponential_V = -np.log1p(-np.minimum((words_V + 0.5) / 2.0**32, 1 - 2.0**-24))
    return int((processed_V - np.log(exponential_V)).argmax())


def random_words(seed: int, position: int, count: int) -> np.ndarray:
    """32 random bits for each token id, as Python integers compute them."""
    key = threefry((seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF, 0, position)
    return np.array([threefry(*key, 0, token)[0] for token in range(count)], np.float64)


def threefry(key0: int, key1: int, x0: int, x1: int) -> tuple[int, int]:
    mask = 0xFFFFFFFF
    keys = (key0, key1, key0 ^ key1 ^ 0x1BD11BDA)
    x0, x1 = (x0 + key0) & mask, (x1 + key1) & mask
    for i in range(20):
        turn = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
        x0 = (x0 + x1) & mask
        x1 = (((x1 << turn) | (x1 >> (32 - turn))) & mask) ^ x0
        if i % 4 == 3:
            x0 = (x0 + keys[(i // 4 + 1) % 3]) & mask
            x1 = (x1 + keys[(i // 4 + 2) % 3] + i // 4 + 1) & mask
    return x0, x1


def log_softmax(logits_V: np.ndarray) -> np.ndarray:
    shifted = logits_V.astype(np.float64) - logits_V.max()
    return shifted - np.log(np.exp(shifted).sum())
