"""Requests that could never be served are refused before they are queued."""

from collections.abc import Container

from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.errors import RequestError
from jaxpaged.messages import EngineCoreRequest


def check_request(
    message: EngineCoreRequest,
    *,
    live_request_ids: Container[str],
    max_model_len: int,
    max_prompt_step: int | None,
    manager: KVCacheManager,
) -> None:
    """Raise RequestError when the request's id is in use, or when it could not run even alone.

    `max_prompt_step` is how many tokens one step computes, if a prompt must fit one step.
    """
    name, num_prompt = message.request_id, len(message.prompt_token_ids)
    max_tokens = message.sampling_params.max_tokens
    if name in live_request_ids:
        raise RequestError(f"request id {name!r} is in use by an unfinished request. Choose another.", "request_id")
    if not num_prompt:
        raise RequestError(f"the prompt of request {name!r} has no tokens. Give at least one.", "prompt")
    if message.pooling_params is not None and num_prompt > max_model_len:
        raise RequestError(
            f"the prompt of request {name!r} has {num_prompt} tokens, but max_model_len is {max_model_len}. Shorten "
            "it, or set truncate_prompt_tokens.",
            "prompt",
        )
    if message.pooling_params is None and num_prompt >= max_model_len:
        raise RequestError(
            f"the prompt of request {name!r} has {num_prompt} tokens, but max_model_len is {max_model_len} and at "
            "least one token must be generated. Shorten the prompt or raise max_model_len.",
            "prompt",
        )
    if max_tokens is None or max_tokens < 1:
        raise RequestError(f"request {name!r} asks for max_tokens {max_tokens}. Ask for at least 1.", "max_tokens")
    if max_prompt_step is not None and num_prompt > max_prompt_step:
        raise RequestError(
            f"the prompt of request {name!r} has {num_prompt} tokens, but chunked prefill is off and a step holds "
            f"max_num_batched_tokens = {max_prompt_step}. Shorten the prompt, or turn chunked prefill on.",
            "prompt",
        )
    # The last token is sampled, and never computed.
    num_tokens = min(num_prompt + max_tokens - 1, max(max_model_len - 1, num_prompt))
    if shortage := manager.shortage(num_tokens):
        needed, block_size, usable = shortage
        raise RequestError(
            f"request {name!r} may need {needed} KV blocks of {block_size} tokens for {num_prompt} prompt tokens and "
            f"max_tokens {max_tokens}, but there are {usable}. Shorten the prompt, lower max_tokens, or give the KV "
            "cache more memory.",
            "max_tokens",
        )
