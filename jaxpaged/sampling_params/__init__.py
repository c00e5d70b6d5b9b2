"""How one request wants its tokens drawn: `SamplingParams` and `BeamSearchParams`.

Names, defaults and ranges are vLLM's. Every value is checked on construction; what needs a vocabulary is
checked by `verify`. A field that is not here does not exist: unknown names are errors, nothing is ignored.

This module knows neither models, tokenizers nor devices.
"""

import enum
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxpaged.errors import RequestError, SuggestsNames, did_you_mean, shown
from jaxpaged.sampling_params.checks import (
    check_bad_words_token_ids,
    check_bool,
    check_count,
    check_extra_args,
    check_ids_in_vocabulary,
    check_int,
    check_logprobs_limit,
    check_text_lengths,
    checked_bias,
    checked_float,
    checked_ids,
    checked_structured_outputs,
    checked_texts,
)
from jaxpaged.sampling_params.limits import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LENGTH_PENALTY,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_MASKED_STOP_IDS,
    MAX_N,
    MAX_REPETITION_PENALTY,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
)
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5
"""Temperatures below this take the most likely token."""
LEAST_TEMPERATURE = 0.01
"""Positive temperatures below this are raised to it: dividing logits by less loses their precision."""


RANDOM_SEED = -1
"""What `seed` is for another result in every run."""

CONTAINERS = (
    "stop",
    "stop_token_ids",
    "bad_words",
    "logprob_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "trace_decode_token_ids",
    "extra_args",
    "bad_words_token_ids",
)
"""Fields that hold a list or a dict, unless they hold None."""
SWITCHES = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
FILLED_IN = ("bad_words_token_ids", "thinking_token_ids", "is_thinking", "returns_mask")
"""Fields that no request sets."""
OPENAI_PENALTIES = ("frequency_penalty", "presence_penalty")
"""Parameters that transformers does not have."""
SHAPING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", *OPENAI_PENALTIES)
"""Numbers that shape the distribution from which a token is sampled."""
SAMPLING_HELP: dict[str, str] = {
    "temperature": "in [0, 2]; 0 takes the most likely token",
    "top_p": "keep the smallest set of tokens whose probability reaches this",
    "top_k": "keep this many of the most likely tokens; 0 keeps all",
    "min_p": "drop tokens less likely than this share of the most likely one",
    "max_tokens": "longest output in tokens; 'none' fills the context",
    "min_tokens": "shortest output in tokens",
    "seed": "the same seed gives the same text; -1 gives another text in every run (default: drawn from --engine-seed)",
    "n": "answers per prompt",
    "stop": "end the output before this text; may be repeated",
    "stop_token_ids": "end the output at one of these tokens",
    "include_stop_str_in_output": "keep the stop text in the output",
    "ignore_eos": "go on after the model's end-of-sequence token",
    "presence_penalty": "in [-2, 2]; above 0, tokens that the output holds become less likely",
    "frequency_penalty": "in [-2, 2]; the same, once for each time that a token occurs",
    "repetition_penalty": "above 0; above 1, tokens of prompt and output become less likely",
    "logit_bias": "numbers added to logits, by token id, as JSON such as '{\"17\": -100}'",
    "allowed_token_ids": "the only tokens that may be drawn",
    "bad_words": "a word whose tokens must not follow each other, with or without a space before it; may be repeated",
    "logprobs": "report this many of the most likely tokens per position (with --json); -1 reports all",
    "prompt_logprobs": "the same for the tokens of the prompt",
    "prompt_logprob_start": "of the prompt's tokens only those from this number on, so that others may be cached",
    "logprob_token_ids": "report these tokens and not the most likely ones",
    "trace_decode_token_ids": "tokens of the output, which are not drawn; the engine needs --enable-trace-replay",
    "routed_experts_prompt_start": "of the prompt's tokens tell the experts of only those from this number on",
    "detokenize": "turn tokens into text (default: on)",
    "skip_special_tokens": "leave special tokens out of the text (default: on)",
    "spaces_between_special_tokens": "write spaces between special tokens (default: on)",
    "skip_reading_prefix_cache": "compute the whole prompt (default: on with --prompt-logprobs of all tokens)",
    "structured_outputs": 'form of the output, as JSON: \'{"regex": "[0-9]+"}\'; or json, choice, grammar, ...',
    "thinking_token_budget": "longest thinking in tokens, for models that mark it with tokens; -1 sets no limit",
    "extra_args": "arguments for custom logits processors, as JSON",
}
"""What each parameter does, in a few words and in the order of the command line. Left out are `output_kind`, which a
command decides, `stream_interval`, which is a flag of the engine, and the fields that no request sets."""


class RequestOutputKind(enum.IntEnum):
    """What a `RequestOutput` holds: everything so far, what is new, or everything and only at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def checked_output_kind(value: Any) -> RequestOutputKind:
    """A member, or its number or name."""
    if type(value) is RequestOutputKind:
        return value
    if isinstance(value, str) and value.upper() in RequestOutputKind.__members__:
        return RequestOutputKind[value.upper()]
    if isinstance(value, int) and not isinstance(value, bool) and value in list(RequestOutputKind):
        return RequestOutputKind(value)
    names = ", ".join(RequestOutputKind.__members__)
    raise RequestError(f"output_kind is {shown(value)}; it must be one of {names}.", "output_kind")


class SamplingParams(msgspec.Struct, metaclass=SuggestsNames, array_like=True, kw_only=True, repr_omit_defaults=True):
    """Parameters of one request. Raises RequestError, with `parameter` naming the field, for what cannot be.

    n: sequences per prompt; with a seed, sequence i is drawn with `seed + i`.
    presence_penalty, frequency_penalty: in [-2, 2]; subtracted from the logit of a token that the output
        contains, once, or once per occurrence.
    repetition_penalty: in [1e-6, 1e6]; divides positive and multiplies negative logits of tokens in prompt or output.
    temperature: in [0, 2]; 0 takes the most likely token and switches off top_p, top_k and min_p.
    top_p: in (0, 1]; keeps the smallest set of most likely tokens whose probability reaches it.
    top_k: keeps the k most likely tokens, and all that tie with the k-th; 0 and -1 keep all.
    min_p: in [0, 1]; drops tokens less likely than min_p times the most likely one.
    seed: a draw depends on (seed, position) only. None: the engine draws one, and its own option `seed` says which, so
        runs repeat; -1: a random one, which never repeats.
    stop: text that ends the output, one or up to 128 of 1024 characters each; needs `detokenize`.
    stop_token_ids: tokens that end the output.
    bad_words: words whose tokens must not come one after the other, as the tokenizer writes a word with and without a
        space before it. As in vLLM the same letters in other tokens may come: "." does not ban the token '".'. To keep
        a text out wherever it stands, exclude it in a grammar of `structured_outputs`.
    include_stop_str_in_output, ignore_eos: as they say.
    max_tokens, min_tokens: length of the output; `max_tokens=None` fills the context.
    logprobs, prompt_logprobs: how many of the most likely tokens to report per position; -1 for all.
    prompt_logprob_start: the first prompt token, counted from 0, that has log probabilities. Those before it have none,
        so the prefix cache may have them.
    logprob_token_ids: report these tokens in place of the most likely ones; `logprobs` becomes their number.
    detokenize, skip_special_tokens, spaces_between_special_tokens: how ids become text.
    logit_bias: token id -> what is added to its logit, clamped to [-100, 100].
    allowed_token_ids: the only tokens that may be drawn.
    trace_decode_token_ids: the tokens of the output, one after the other, whatever the model would draw. Nothing else
        ends it: `max_tokens` becomes their number, and stop strings, stop tokens and `min_tokens` have no effect. Log
        probabilities are those that the model and the other parameters give to them. For engines with
        `enable_trace_replay`.
    routed_experts_prompt_start: the first prompt token, counted from 0, whose experts are told, by engines with
        `enable_return_routed_experts`.
    output_kind: see `RequestOutputKind`.
    stream_interval: how many tokens of a sequence a result waits for, but for the first and the last one; at least the
        engine's own `stream_interval`.
    extra_args: for custom logits processors and connectors.
    skip_reading_prefix_cache: compute the whole prompt; set when log probabilities of a whole prompt are asked for.
    structured_outputs: what shape the output must have, see `StructuredOutputsParams`; a dict of its fields will do.
    thinking_token_budget: how many tokens the model may think, each time it does, before it must end that; -1 and None:
        as many as it likes. For models whose vocabulary has tokens around thinking.
    thinking_token_ids: filled by the input processor: those that begin and end thinking.
    is_thinking: filled by the input processor: whether the prompt leaves the model thinking, where it has a budget.
    bad_words_token_ids: filled by the input processor: `bad_words` in tokens.
    returns_mask: filled by the input processor: the engine tells what limits leave, and the request has some.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    bad_words_token_ids: list[list[int]] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    thinking_token_ids: tuple[int, int] | None = None
    is_thinking: bool = False
    stream_interval: int | None = None
    prompt_logprob_start: int = 0
    trace_decode_token_ids: list[int] | None = None
    returns_mask: bool = False
    routed_experts_prompt_start: int = 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from names and values, such as a JSON object. Unknown names raise RequestError."""
        public = [name for name in cls.__struct_fields__ if name not in FILLED_IN]
        for name in values:
            if name not in public:
                raise RequestError(
                    f"unknown sampling parameter {name!r} with value {values[name]!r}."
                    f"{did_you_mean(str(name), public) or ' Leave it out.'}",
                    str(name),
                )
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_words(self) -> bool:
        """Whether it says something that must be put in tokens."""
        return bool(self.bad_words) or self.thinking_token_budget is not None

    @property
    def is_limited(self) -> bool:
        """Whether tokens are drawn, and not from the whole vocabulary."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def clone(self) -> "SamplingParams":
        """A copy that shares no list or dict with this one, and is checked: an attribute may have been set since."""
        containers = {
            name: value.copy() for name in CONTAINERS if isinstance(value := getattr(self, name), list | dict)
        }
        return msgspec.structs.replace(self, **containers)

    def child(self, index: int) -> "SamplingParams":
        """Parameters of sequence `index` of `n`: one sequence, its own seed if a seed was given."""
        seed = self.seed if self.seed in (None, RANDOM_SEED) else (self.seed + index) % 2**64
        child = self.clone()
        child.n, child.seed = 1, seed
        return child

    def verify(self, vocab_size: int, max_logprobs: int) -> None:
        """Check what needs the model: token ids against the vocabulary, counts against the engine's limit.

        Call it again once `bad_words_token_ids` is filled. Raises RequestError.
        """
        for name in (
            "stop_token_ids",
            "allowed_token_ids",
            "logprob_token_ids",
            "logit_bias",
            "trace_decode_token_ids",
        ):
            check_ids_in_vocabulary(name, getattr(self, name) or (), vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            check_logprobs_limit(name, getattr(self, name), vocab_size, max_logprobs)
        if self.bad_words_token_ids:
            check_bad_words_token_ids(self.bad_words_token_ids, vocab_size)

    def __post_init__(self) -> None:
        if self.trace_decode_token_ids is not None:
            self._follow_trace()
        self._check_numbers()
        self._check_lengths()
        self._check_logprobs()
        self._check_texts()
        self._check_token_ids()
        self._check_switches()
        self._settle_temperature()

    def _follow_trace(self) -> None:
        """What is drawn and when it ends is given."""
        name = "trace_decode_token_ids"
        self.trace_decode_token_ids = checked_ids(name, self.trace_decode_token_ids)
        check_count(name, len(self.trace_decode_token_ids), 1, 2**31 - 1)
        neutral = {"n": 1, "structured_outputs": None, "thinking_token_budget": None}
        for other, value in neutral.items():
            if (given := getattr(self, other)) != value:
                raise RequestError(
                    f"{name} says which tokens come, and so does {other} {shown(given)}. Leave one out.", other
                )
        self.max_tokens, self.min_tokens = len(self.trace_decode_token_ids), 0
        self.stop, self.stop_token_ids, self.ignore_eos = None, None, True

    def _check_numbers(self) -> None:
        self.presence_penalty = checked_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = checked_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = checked_float(
            "repetition_penalty", self.repetition_penalty, 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        )
        self.temperature = checked_float("temperature", self.temperature, 0.0, 2.0)
        self.top_p = checked_float("top_p", self.top_p, above=0.0, maximum=1.0)
        self.min_p = checked_float("min_p", self.min_p, 0.0, 1.0)
        check_int("top_k", self.top_k, -1, 2**31 - 1, "0 or -1 keeps all tokens")
        self.top_k = max(self.top_k, 0)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1, "it has 64 bits")

    def _check_lengths(self) -> None:
        check_int("n", self.n, 1, MAX_N)
        check_int("routed_experts_prompt_start", self.routed_experts_prompt_start, 0, 2**31 - 1)
        check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.thinking_token_budget is not None:
            check_int("thinking_token_budget", self.thinking_token_budget, -1, 2**31 - 1, "-1 means no limit")
            self.thinking_token_budget = None if self.thinking_token_budget == -1 else self.thinking_token_budget
        if self.stream_interval is not None:
            check_int("stream_interval", self.stream_interval, 1, 2**31 - 1)
        if self.max_tokens is None:
            return
        check_int("max_tokens", self.max_tokens, 1, 2**31 - 1, "None fills the context")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}. "
                "Raise max_tokens or lower min_tokens.",
                "min_tokens",
            )

    def _check_logprobs(self) -> None:
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, -1, 2**31 - 1, "-1 means the whole vocabulary")
        if self.prompt_logprobs is not None:
            check_int("prompt_logprobs", self.prompt_logprobs, -1, 2**31 - 1, "-1 means the whole vocabulary")
        check_int("prompt_logprob_start", self.prompt_logprob_start, 0, 2**31 - 1)
        if self.prompt_logprob_start and self.prompt_logprobs is None:
            raise RequestError(
                f"prompt_logprob_start is {self.prompt_logprob_start}, but log probabilities of the prompt were not "
                "asked for. Set prompt_logprobs.",
                "prompt_logprob_start",
            )
        if self.prompt_logprobs is not None and self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprob_start == 0
        if self.logprob_token_ids is None:
            return
        ids = self.logprob_token_ids = checked_ids("logprob_token_ids", self.logprob_token_ids)
        check_count("logprob_token_ids", len(ids), 1, MAX_LOGPROB_TOKEN_IDS)
        if self.logprobs is None:
            self.logprobs = len(ids)
        elif self.logprobs != len(ids):
            raise RequestError(
                f"logprobs is {self.logprobs}, but logprob_token_ids has {len(ids)} ids. "
                "Leave logprobs out, or make it that number.",
                "logprobs",
            )

    def _check_texts(self) -> None:
        self.stop = checked_texts("stop", self.stop)
        if self.stop:
            check_count("stop", len(self.stop), 0, MAX_STOPS)
            check_text_lengths("stop", self.stop, MAX_STOP_CHARACTERS)
        self.bad_words = checked_texts("bad_words", self.bad_words)
        if self.bad_words:
            check_count("bad_words", len(self.bad_words), 0, MAX_BAD_WORDS)
            check_text_lengths("bad_words", self.bad_words, MAX_BAD_WORD_CHARACTERS)
        if self.stop and self.detokenize is False:
            raise RequestError(
                f"stop is {self.stop!r}, but detokenize is False, so there is no text to find it in. "
                "Use stop_token_ids, or leave detokenize on.",
                "stop",
            )

    def _check_token_ids(self) -> None:
        stop_token_ids = () if self.stop_token_ids is None else self.stop_token_ids
        self.stop_token_ids = list(dict.fromkeys(checked_ids("stop_token_ids", stop_token_ids)))
        if self.min_tokens:
            # One place is left for the end-of-sequence id.
            check_count("stop_token_ids", len(self.stop_token_ids), 0, MAX_MASKED_STOP_IDS - 1)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = checked_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids is empty, so no token could follow. Leave it out.", "allowed_token_ids"
                )
        if self.logit_bias is not None:
            self.logit_bias = checked_bias(self.logit_bias)

    def _check_switches(self) -> None:
        for name in SWITCHES:
            check_bool(name, getattr(self, name))
        if self.skip_reading_prefix_cache is not None:
            check_bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        self.output_kind = checked_output_kind(self.output_kind)
        if self.extra_args is not None:
            check_extra_args(self.extra_args)
        if self.structured_outputs is not None:
            self.structured_outputs = checked_structured_outputs(self.structured_outputs)

    def _settle_temperature(self) -> None:
        if self.greedy:
            if self.n > 1:
                raise RequestError(
                    f"n is {self.n}, but at temperature {self.temperature} all sequences would be equal. "
                    "Set n to 1 or raise the temperature.",
                    "n",
                )
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < LEAST_TEMPERATURE:
            logger.warning("temperature %g is raised to %g", self.temperature, LEAST_TEMPERATURE)
            self.temperature = LEAST_TEMPERATURE


class BeamSearchParams(msgspec.Struct, metaclass=SuggestsNames, kw_only=True, repr_omit_defaults=True):
    """Beam search: the `beam_width` sequences of best total log probability / length ** length_penalty.

    Raises RequestError for values that cannot be.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_N)
        check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        self.temperature = checked_float("temperature", self.temperature, 0.0, 2.0)
        self.length_penalty = checked_float(
            "length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
