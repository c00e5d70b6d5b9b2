"""What a request asks for beyond a token of the plain sampling program, read off its parameters.

The core, which has to know which programs a request needs, and the sampler go by the same lists.
"""

import enum

from jaxpaged.sampling_params import SamplingParams


class Feature(enum.IntFlag):
    """What a row needs beyond the plain sampling program. Its `SamplingState` is read only for what is set here."""

    NONE = 0
    PENALTIES = 1
    LOGIT_BIAS = 2
    ALLOWED = 4
    MIN_TOKENS = 8
    BAD_WORDS = 16
    LOGPROBS = 32
    LOGPROB_IDS = 64
    TRACE = 128
    MASK = 256


class Extra(enum.Enum):
    """Programs that ordinary requests do not need: they are compiled once somebody asks for them."""

    MASKS = "the program that keeps answers to their grammars"
    FULL_SAMPLER = "the program that draws with penalties, biases and log probabilities"
    PROMPT_LOGPROBS = "the program that gives log probabilities of prompts"
    PICTURES = "the programs that make embeddings of pictures"
    VIDEOS = "the programs that make embeddings of videos"


def features_of(params: SamplingParams) -> Feature:
    """Which features of the full sampling program a request uses, custom processors aside."""
    penalties = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    wanted = (
        (Feature.PENALTIES, penalties),
        (Feature.LOGIT_BIAS, params.logit_bias),
        (Feature.ALLOWED, params.allowed_token_ids is not None),
        (Feature.MIN_TOKENS, params.min_tokens),
        (Feature.BAD_WORDS, params.bad_words_token_ids),
        (Feature.LOGPROBS, params.logprobs is not None),
        (Feature.LOGPROB_IDS, params.logprob_token_ids),
        (Feature.TRACE, params.trace_decode_token_ids),
        (Feature.MASK, params.returns_mask),
    )
    return Feature(sum(feature for feature, used in wanted if used))


def limiting_fields(params: SamplingParams) -> list[str]:
    """The fields of a request that keep tokens from being drawn; a bias never does, however large."""
    limits = {
        "structured_outputs": params.structured_outputs is not None,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": params.bad_words_token_ids,
        "min_tokens": params.min_tokens,
        "thinking_token_budget": params.thinking_token_budget is not None,
        "extra_args": params.extra_args,  # of custom logits processors
    }
    return [name for name, used in limits.items() if used]


def extras_of(params: SamplingParams) -> list[Extra]:
    """The programs that a request needs and others do not."""
    bound = params.structured_outputs is not None or params.thinking_token_budget is not None
    wanted = (
        (Extra.MASKS, bound),
        (Extra.FULL_SAMPLER, features_of(params)),
        (Extra.PROMPT_LOGPROBS, params.prompt_logprobs is not None),
    )
    return [extra for extra, used in wanted if used]
