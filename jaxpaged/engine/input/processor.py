"""Prompts and chats to checked, complete `EngineCoreRequest`s.

All that can be wrong with a request by itself is found here, and raised as RequestError. This module does not know
whether the request fits the KV cache, nor when it will run.
"""

import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from jaxpaged.engine.input.chat_template import OWN_VARIABLES, ChatTemplates, Message, check_messages
from jaxpaged.engine.input.generation_config import GenerationDefaults
from jaxpaged.engine.input.grammar_checker import GrammarChecker
from jaxpaged.engine.input.no_tokenizer import NoTokenizer, refuse
from jaxpaged.engine.input.params_of_model import (
    check_experts_start,
    check_mask,
    check_some_token_is_left,
    check_trace,
    check_without_text,
    put_in_tokens,
    thinking_token_ids,
)
from jaxpaged.engine.input.picture_parts import PictureOptions, check_not_cut, refuse_pictures
from jaxpaged.engine.input.prompts import ChatWithPictures, Prompt
from jaxpaged.engine.input.tokenizer import Tokenizer, Truncation, checked_length, enough_text
from jaxpaged.engine.pooling.io_processor import IOProcessing
from jaxpaged.engine.pooling.pooler import Pooler
from jaxpaged.engine.pooling.prompts import check_keep, text_ids, with_types
from jaxpaged.errors import RequestError, check_unicode, did_you_mean, shown
from jaxpaged.kv_store.transfer_params import check_request
from jaxpaged.messages import EngineCoreRequest, MultiModalFeature
from jaxpaged.multimodal.budget import MakeRoom
from jaxpaged.multimodal.sources import PictureSource
from jaxpaged.pooling import PoolingParams
from jaxpaged.sampling_params import RANDOM_SEED, SamplingParams
from jaxpaged.sampling_params.checks import check_bool, check_int, checked_float
from jaxpaged.sampling_params.limits import MAX_MASKED_STOP_IDS

if TYPE_CHECKING:
    from jaxpaged.engine.input.picture_prompts import PicturePrompts, SeenPrompt
    from jaxpaged.engine.input.pictures import PictureIntake

WHOLE = Truncation()
PROMPT_KEYS = ("prompt", "prompt_token_ids", "token_type_ids", "cache_salt", "priority", "ending")
PICTURE_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "mm_features")
TEXT_ONLY = "this model takes text only"
TOKENIZATION_KEYS = ("add_special_tokens", "truncate_prompt_tokens")
MAX_CACHE_SALT_LENGTH = 128
NO_POOLING = "this model was started to generate, and gives no embeddings or scores. Start it with runner='pooling'."
NO_GENERATION = "this model was started for pooling, and generates nothing. Start it with runner='generate'."


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt in one form: ids, the text they came from if any, and what a dict may carry besides."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    ending: str | None = None  # of a chat: what its template wrote behind the last message
    mm_features: tuple[MultiModalFeature, ...] = ()


class InputProcessor:
    """Tokenises and completes requests for one model.

    `vocab_size` is the model's. `allow_priority`: the scheduler orders requests by priority. `stream_interval`: that of
    requests which say less.
    Requests without a seed get one drawn from a generator seeded with `seed`, so that runs can be repeated; those with
    seed -1 get one from the system.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        max_logprobs: int = 20,
        seed: int = 0,
        allow_priority: bool = False,
        stream_interval: int = 1,
        defaults: GenerationDefaults | None = None,
        chat_templates: ChatTemplates | None = None,
        grammar_checker: GrammarChecker | None = None,
        pooler: Pooler | None = None,
        kv_peers: tuple[str | None, str] = (None, ""),
        pictures: "PictureIntake | None" = None,
        why_no_pictures: str = TEXT_ONLY,
        queue_policy: Callable[[EngineCoreRequest], int] | None = None,
        io_processor: IOProcessing | None = None,
        replays: bool = False,
        returns_masks: bool = False,
        tells_experts: bool = False,
    ):
        """`kv_peers`: the engine's role, and the other engines that requests may name. `pictures` None: there can be
        none, and why, in the second half of a sentence. `queue_policy`: what gives requests their priority. `replays`:
        outputs may be given. `returns_masks`: results have what limits left. `tells_experts`: and experts."""
        self._replays, self._returns_masks, self._tells_experts = replays, returns_masks, tells_experts
        self._queue_policy = queue_policy
        self.io_processor = io_processor
        self.pictures = pictures
        self.why_no_pictures = why_no_pictures
        self._picture_prompts: PicturePrompts | None = None
        if pictures is not None:
            from jaxpaged.engine.input import picture_prompts  # with what processes pictures, which text does without

            self._picture_prompts = picture_prompts.PicturePrompts(pictures, max_model_len)
        self._kv_peers = kv_peers
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.max_logprobs = max_logprobs
        self.allow_priority = allow_priority
        self.stream_interval = stream_interval
        self.defaults = defaults or GenerationDefaults({})
        self.chat_templates = chat_templates or ChatTemplates({})
        self.grammar_checker = grammar_checker or GrammarChecker()
        self.pooler = pooler
        self._seeds = random.Random(seed)
        ends = [*self.defaults.eos_token_ids, tokenizer.eos_token_id]
        self.eos_token_ids = list(dict.fromkeys(i for i in ends if i is not None and i < vocab_size))
        self.thinking_token_ids = thinking_token_ids(tokenizer.added_tokens)
        self.eos_token_id = tokenizer.eos_token_id
        if self.eos_token_id is None and self.eos_token_ids:
            self.eos_token_id = self.eos_token_ids[0]

    def close(self) -> None:
        """End the processes that check grammars and decode pictures."""
        self.grammar_checker.close()
        if self.pictures is not None:
            self.pictures.close()

    @property
    def has_tokenizer(self) -> bool:
        """Whether requests may have text."""
        return not isinstance(self.tokenizer, NoTokenizer)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        make_room: MakeRoom | None = None,
    ) -> tuple[EngineCoreRequest, str | None]:
        """The complete request, and the prompt's text if it was given as text.

        `params` None means the model's own defaults. `truncate_prompt_tokens` keeps that many of the prompt's last
        tokens; -1 keeps as many as leave room for one new token. With `PoolingParams` it keeps the first ones, special
        tokens included, and -1 is as many as the model takes. `make_room` is called where pictures would wait for
        memory that only the caller can free. Raises RequestError.
        """
        check_identity(request_id, arrival_time, add_special_tokens)
        params = self._checked_kind(params)
        if isinstance(params, PoolingParams):
            pooling_params, sampling_params = params, one_token(params)
            keep = params.truncate_prompt_tokens if truncate_prompt_tokens is None else truncate_prompt_tokens
            parsed = self._parse_for_pooling(prompt, keep, add_special_tokens)
        else:
            pooling_params, sampling_params = None, params
            parsed = self.parse(prompt, add_special_tokens, Truncation(truncate_prompt_tokens), make_room=make_room)
        token_ids = parsed.token_ids
        if parsed.priority is not None:
            priority = parsed.priority
        check_priority(priority, self.allow_priority)
        self._check_length(token_ids, room=0 if pooling_params else 1)
        complete = self._completed(sampling_params, parsed)
        if complete.extra_args:
            check_request(complete.extra_args, *self._kv_peers)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=complete,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            eos_token_id=None if complete.ignore_eos else self.eos_token_id,
            priority=priority,
            cache_salt=parsed.cache_salt,
            pooling_params=pooling_params,
            mm_features=list(parsed.mm_features),
        )
        if self._queue_policy is not None:
            request.priority = self._queue_policy(request)
        return request, parsed.text

    def _checked_kind(self, params: Any) -> SamplingParams | PoolingParams:
        """The parameters, or the model's own. Raises RequestError when they are for another kind of engine."""
        if isinstance(params, PoolingParams):
            if self.pooler is None:
                raise RequestError(NO_POOLING, "model")
            self.pooler.check(params)
            return params
        if self.pooler is not None:
            raise RequestError(NO_GENERATION, "model")
        return params if params is not None else self.defaults.sampling_params()

    # ---- prompts

    def parse(
        self,
        prompt: Prompt,
        add_special_tokens: bool = True,
        truncation: Truncation = WHOLE,
        most: int | None = None,
        make_room: MakeRoom | None = None,
    ) -> ParsedPrompt:
        """Bring a prompt into one form, cut as `truncation` says.

        Only the part of a text that is kept is tokenised, and one that certainly has more than `most` tokens, as a rule
        `max_model_len`, is refused before. Raises RequestError for that, and when a prompt is empty or none at all.
        """
        if isinstance(prompt, Mapping):
            return self._parse_dict(prompt, add_special_tokens, truncation, make_room)
        if isinstance(prompt, str):
            return ParsedPrompt(self._encode(prompt, add_special_tokens, truncation, most), prompt)
        return ParsedPrompt(self._checked_ids(prompt, truncation))

    def prepared(self, prompt: Mapping[str, Any], add_special_tokens: bool, truncation: Truncation) -> dict[str, Any]:
        """A prompt with pictures as one whose pictures are processed. It may wait for long. Raises RequestError."""
        parsed = self.parse(prompt, add_special_tokens, truncation)
        fields = {"prompt": parsed.text, "prompt_token_ids": parsed.token_ids, "mm_features": parsed.mm_features}
        others = {"cache_salt": parsed.cache_salt, "priority": parsed.priority, "ending": parsed.ending}
        return fields | {name: value for name, value in others.items() if value is not None}

    def _parse_for_pooling(self, prompt: Prompt, keep: int | None, add_special_tokens: bool) -> ParsedPrompt:
        """The same, of which the first `keep` tokens are left; those that the tokenizer adds are always there."""
        keep = check_keep(keep, self.max_model_len)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        is_text = not isinstance(prompt, Mapping) or prompt.get("prompt_token_ids") is None
        if keep is None or not (is_text and isinstance(text, str)):
            return self.parse(prompt, add_special_tokens, Truncation(keep, from_right=True))
        first = self.parse(prompt, add_special_tokens, Truncation(1, from_right=True))
        return replace(first, token_ids=text_ids(self.tokenizer, (text,), keep, add_special_tokens))

    def _parse_dict(
        self, prompt: Mapping[str, Any], add_special_tokens: bool, truncation: Truncation, make_room: MakeRoom | None
    ) -> ParsedPrompt:
        if isinstance(chat := prompt.get("chat"), ChatWithPictures):
            prompt = self.chat_prompt(chat.messages, make_room=make_room, **chat.options)
        for key in prompt:
            if key not in PROMPT_KEYS and key not in PICTURE_KEYS:
                near = did_you_mean(str(key), PROMPT_KEYS)
                raise RequestError(f"a prompt has the unknown key {shown(key)}.{near}", "prompt")
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"the key 'prompt' holds {shown(text)}; it must be a text.", "prompt")
        if text is None and ids is None:
            raise RequestError("a prompt dict needs 'prompt' or 'prompt_token_ids'; it has neither.", "prompt")
        salt, ending = checked_cache_salt(prompt.get("cache_salt")), prompt.get("ending")
        features: tuple[MultiModalFeature, ...] = tuple(prompt.get("mm_features") or ())
        if prompt.get("multi_modal_data") or prompt.get("multi_modal_uuids"):
            seen = self._seen(prompt, add_special_tokens, make_room)
            token_ids, text, features = seen.token_ids, seen.text, seen.features
            check_not_cut(token_ids, truncation, self.max_model_len - 1)
        elif ids is not None:
            token_ids = self._checked_ids(ids, WHOLE if features else truncation, has_pictures=bool(features))
        else:
            token_ids = self._encode(text or "", add_special_tokens, truncation)
        if (types := prompt.get("token_type_ids")) is not None:
            token_ids = with_types(token_ids, types, len(ids or ()), self.pooler)
        if ending is not None and not isinstance(ending, str):
            raise RequestError(f"the key 'ending' holds {shown(ending)}; it must be a text.", "prompt")
        return ParsedPrompt(token_ids, text, salt, prompt.get("priority"), ending, features)

    def _seen(self, prompt: Mapping[str, Any], add_special_tokens: bool, make_room: MakeRoom | None) -> "SeenPrompt":
        """A prompt with `multi_modal_data`. Raises RequestError."""
        if self._picture_prompts is None:
            why = f"multi_modal_data is given, but {self.why_no_pictures}. Leave it out."
            raise RequestError(why, "multi_modal_data")
        if prompt.get("prompt_token_ids") is not None:
            ids = self._checked_ids(prompt["prompt_token_ids"], has_pictures=True)
            prompt = {**prompt, "prompt_token_ids": ids}
        elif not self.has_tokenizer:
            refuse("a prompt as text", "prompt")
        return self._picture_prompts.of_dict(prompt, add_special_tokens, make_room)

    def _encode(
        self, text: str, add_special_tokens: bool, truncation: Truncation = WHOLE, most: int | None = None
    ) -> list[int]:
        if not self.has_tokenizer:
            refuse("a prompt as text", "prompt")
        if not text:
            raise RequestError("the prompt is empty. Give it at least one character.", "prompt")
        keep = truncation.length(self.max_model_len - 1)
        if keep is None:
            checked_length(self.tokenizer, text, self.max_model_len if most is None else most)
        else:
            text = enough_text(self.tokenizer, text, keep, from_end=not truncation.from_right)
        check_unicode("prompt", text)
        if self._picture_prompts is None:
            ids = self.tokenizer.encode(text, add_special_tokens)
        else:
            ids = self._picture_prompts.words(text, add_special_tokens)
        if not ids:
            raise RequestError(f"the prompt {text[:40]!r} has no tokens. Give it at least one.", "prompt")
        return truncation.cut(ids, self.max_model_len - 1)

    def _checked_ids(self, ids: Any, truncation: Truncation = WHOLE, *, has_pictures: bool = False) -> list[int]:
        """Ids as a list of plain ints within the model's vocabulary; those that are cut off are not looked at."""
        checked = self._ids_of_vocabulary(ids, truncation)
        if self._picture_prompts is not None and not has_pictures:
            self._picture_prompts.check_no_placeholders(checked)
        return checked

    def _ids_of_vocabulary(self, ids: Any, truncation: Truncation) -> list[int]:
        if hasattr(ids, "tolist"):  # numpy and other arrays
            ids = ids.tolist()
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise RequestError(f"a prompt is {shown(ids)}; it must be text, token ids, or a dict of either.", "prompt")
        if not ids:
            raise RequestError("the prompt has no token ids. Give it at least one.", "prompt")
        ids = truncation.cut(ids, self.max_model_len - 1)
        if set(map(type, ids)) == {int} and 0 <= min(ids) <= max(ids) < self.vocab_size:
            return ids
        for position, token_id in enumerate(ids):
            whole = isinstance(token_id, Integral) and not isinstance(token_id, bool)
            if not whole or not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"the prompt has token id {shown(token_id)} at position {position}, but the vocabulary has "
                    f"{self.vocab_size} ids. Use whole numbers from 0 to {self.vocab_size - 1}.",
                    "prompt",
                )
        return [int(token_id) for token_id in ids]

    def _check_length(self, token_ids: list[int], room: int) -> None:
        if not room and len(token_ids) > self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, but may have at most max_model_len = {self.max_model_len}. "
                "Shorten it, or set truncate_prompt_tokens.",
                "prompt",
            )
        if room and len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, but prompt and output together may have at most "
                f"max_model_len = {self.max_model_len}, so the prompt at most {self.max_model_len - 1}. "
                "Shorten it, or raise max_model_len.",
                "prompt",
            )

    # ---- chats

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        truncation: Truncation = WHOLE,
        most: int | None = None,
        thinking_markers: Sequence[str] = (),
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        media_io_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        make_room: MakeRoom | None = None,
    ) -> dict[str, Any]:
        """A conversation as a prompt dict, cut and limited as in `parse`. Templates write special tokens themselves, so
        none are added unless `add_special_tokens` says so.

        Where the prompt holds one of `thinking_markers`, or one that the vocabulary has a token for, the dict has the
        key "ending": the part that the template wrote behind the last message. In it alone a marker means that the
        model thinks, or does not; all before are words of users, or of earlier answers.

        Messages may have pictures: then this may wait for long, and the dict has the key "mm_features", the pictures
        once they are processed as `mm_processor_kwargs` and `media_io_kwargs` say. Their uuids belong to `cache_salt`.
        `make_room`: see `process`. Raises RequestError when the messages or the template are at fault.
        """
        if not self.has_tokenizer:
            refuse("a chat", "messages")
        variables = dict(template_variables or {})
        if bad := [name for name in variables if not isinstance(name, str) or name in OWN_VARIABLES]:
            raise RequestError(
                f"chat_template_kwargs sets {bad[0]!r}, which is not a variable of the template alone. Leave it out.",
                "chat_template_kwargs",
            )
        template = self.chat_templates.choose(chat_template, with_tools=bool(tools))
        given = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **self.tokenizer.named_tokens,
            **variables,
        }
        sources: list[PictureSource] = []
        if self._picture_prompts is None:
            if has_parts(messages):
                refuse_pictures(messages, self.why_no_pictures)
        else:
            check_messages(messages, add_generation_prompt, continue_final_message)
            messages, sources = self._picture_prompts.opened(messages, template.takes_parts)
            given["tools"] = self._picture_prompts.placeholders.guarded_value(tools)
        text = template.render(messages, **given)
        check_unicode("messages", text)
        if sources and self._picture_prompts is not None:
            options = PictureOptions(mm_processor_kwargs, media_io_kwargs, cache_salt, make_room)
            prompt = self._picture_prompts.of_chat(text, sources, options, add_special_tokens, most)
            check_not_cut(prompt["prompt_token_ids"], truncation, self.max_model_len - 1)
        else:
            token_ids = self._encode(text, add_special_tokens, truncation, most)
            prompt = {"prompt": self._shown(text), "prompt_token_ids": token_ids}
        may_think = any(marker in text for marker in thinking_markers)
        if may_think or not set(self.thinking_token_ids or ()).isdisjoint(prompt["prompt_token_ids"]):
            prompt["ending"] = self._shown(template.ending(messages, **given))
        return prompt

    def _shown(self, text: str) -> str:
        """What a template gave, as a user would write it."""
        return text if self._picture_prompts is None else self._picture_prompts.placeholders.shown(text)

    # ---- sampling parameters

    def _completed(self, params: SamplingParams, prompt: ParsedPrompt) -> SamplingParams:
        """A copy in which nothing is left open: length, seed, end ids, bad words in tokens, whether it thinks."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"the parameters are {shown(params)}; they must be SamplingParams.", "sampling_params")
        complete = params.clone()
        if not self.has_tokenizer:
            check_without_text(complete)
            complete.detokenize = False
        room = max(self.max_model_len - len(prompt.token_ids), 1)
        if complete.routed_experts_prompt_start:
            length = len(prompt.token_ids) if self._tells_experts else None
            check_experts_start(complete.routed_experts_prompt_start, length)
        complete.returns_mask = self._returns_masks and complete.is_limited
        if complete.returns_mask:
            check_mask(complete.top_k)
        if complete.trace_decode_token_ids is not None:
            check_trace(len(complete.trace_decode_token_ids), room if self._replays else None)
        complete.max_tokens = room if complete.max_tokens is None else min(complete.max_tokens, room)
        complete.min_tokens = min(complete.min_tokens, complete.max_tokens)
        complete.stream_interval = max(complete.stream_interval or 1, self.stream_interval)
        if complete.seed is None:
            complete.seed = self._seeds.getrandbits(64)
        elif complete.seed == RANDOM_SEED:
            complete.seed = secrets.randbits(64)
        ends = [] if complete.ignore_eos else self.eos_token_ids
        complete.stop_token_ids = stop_ids = list(dict.fromkeys([*(complete.stop_token_ids or ()), *ends]))
        if complete.has_words:
            put_in_tokens(complete, self.tokenizer, self.thinking_token_ids, prompt.token_ids, prompt.ending)
        complete.verify(self.vocab_size, self.max_logprobs)
        if complete.allowed_token_ids is not None:
            check_some_token_is_left(complete, stop_ids)
        if complete.structured_outputs is not None:
            self.grammar_checker.check(complete.structured_outputs)
        if complete.min_tokens and len(stop_ids) > MAX_MASKED_STOP_IDS:
            raise RequestError(
                f"with min_tokens at most {MAX_MASKED_STOP_IDS} stop ids are possible, the model's own included; "
                f"there are {len(stop_ids)}. Use fewer stop_token_ids.",
                "stop_token_ids",
            )
        return complete


def tokenization_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """vLLM's `tokenization_kwargs` as arguments of `InputProcessor.process`. Raises RequestError for unknown keys."""
    for name in given or {}:
        if name not in TOKENIZATION_KEYS:
            raise RequestError(
                f"tokenization_kwargs has the unknown key {name!r}.{did_you_mean(str(name), TOKENIZATION_KEYS)} "
                f"Known are {', '.join(TOKENIZATION_KEYS)}.",
                "tokenization_kwargs",
            )
    return dict(given or {})


def one_token(params: PoolingParams) -> SamplingParams:
    """What a pooling request is to the scheduler: a prompt, and one token, which is never drawn."""
    return SamplingParams(
        max_tokens=1,
        seed=0,
        ignore_eos=True,
        detokenize=False,
        skip_reading_prefix_cache=params.skip_reading_prefix_cache,
    )


def check_identity(request_id: Any, arrival_time: Any, add_special_tokens: Any) -> None:
    """Raise RequestError for what a caller says of a request that is neither prompt nor parameter."""
    if not isinstance(request_id, str):
        raise RequestError(f"request_id is {shown(request_id)}; it must be a text.", "request_id")
    check_unicode("request_id", request_id)
    if arrival_time is not None:
        checked_float("arrival_time", arrival_time)
    check_bool("add_special_tokens", add_special_tokens)


def check_priority(priority: Any, allowed: bool) -> None:
    check_int("priority", priority, -(2**63), 2**63 - 1, "the least goes first")
    if priority and not allowed:
        raise RequestError(
            f"priority is {priority}, but the engine serves in order of arrival. "
            "Leave it out, or start the engine with scheduling_policy='priority'.",
            "priority",
        )


def checked_cache_salt(salt: Any) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT_LENGTH:
        raise RequestError(
            f"cache_salt is {shown(salt)}; it must be a text of 1 to {MAX_CACHE_SALT_LENGTH} characters.", "cache_salt"
        )
    check_unicode("cache_salt", salt)
    return salt


def has_parts(messages: Any) -> bool:
    """Whether the content of a message is a list. Messages may be malformed still."""
    return isinstance(messages, Sequence) and any(
        isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple) for message in messages
    )
