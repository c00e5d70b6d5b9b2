"""Grammars of requests: compiled in threads, kept by content, and one matcher for every request that has one.

A matcher says which tokens may come next, as bits, and moves on with each new token. Compiling releases the
interpreter's lock, so neither steps nor other grammars wait for it. The front end has checked beforehand that a grammar
can be compiled, and soon: see `engine/input/grammar_checker.py`.

This module knows no scheduler and no device, and no text but that of grammars.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from jaxpaged.core.grammar.text import error_of, grammar_text, import_llguidance, limits
from jaxpaged.errors import RequestError
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams

STACK_BYTES = 64 * 2**20
"""Of a compiling thread. The compiler follows chains of rules by recursion; checkers have far smaller stacks, so what
passed them fits here."""
MOST_GRAMMARS = 256
"""Compiled grammars that are kept for later requests."""


class Matcher:
    """Where one request stands in its grammar. Once it has an error it allows nothing and never recovers."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    @property
    def error(self) -> str | None:
        """Why it cannot go on: the grammar costs more than one step may, or a token did not fit."""
        return error_of(self._matcher)

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing but an end-of-sequence token can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the answer is whole as it is."""
        return self._matcher.is_accepting()

    def num_free(self, num_unknown: int) -> int:
        """How many tokens need no mask after `num_unknown` that were drawn and are not known yet: none."""
        return 0

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Move on. False: a token did not fit, and the matcher has an error."""
        return self._matcher.consume_tokens(list(token_ids))

    def fill(self, bits_IW: np.ndarray, token_ids: Sequence[int] = ()) -> None:
        """Write which tokens may come next, and which behind each of `token_ids` if these come; the matcher stays where
        it is. `bits_IW` is uint32 [1 + number of tokens, words], bit t % 32 of word t // 32 for token t: zeros where
        the grammar cannot be followed. Lines behind a token that does not fit or completes the answer are left alone.
        """
        self._fill_line(bits_IW[0])
        if not token_ids or self._matcher.is_error():
            return
        before, num_taken = self._matcher.deep_copy(), 0
        fitting = token_ids[: self._matcher.validate_tokens(list(token_ids))]
        for bits_W, token_id in zip(bits_IW[1:], fitting):
            self._matcher.consume_token(token_id)
            num_taken += 1
            if self._matcher.is_stopped():
                break
            self._fill_line(bits_W)
        if self._matcher.is_error():
            self._matcher = before  # what costs too much behind tokens that may never come fails nobody
        elif num_taken:
            assert self._matcher.rollback(num_taken), f"{num_taken} tokens cannot be taken back: {self.error}"

    def _fill_line(self, bits_W: np.ndarray) -> None:
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        bits_W[:] = 0
        if not self._matcher.is_error():
            bits_W[: len(words)] = words[: len(bits_W)]


class Grammars:
    """Compiles the grammars of one model's vocabulary; with an error of its own for each request.

    `tokenizer_json` is the text of `tokenizer.json`; `vocab_size` the model's; any of `eos_token_ids` ends an answer
    where the grammar lets it end.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int], num_threads: int = 2):
        self.vocab_size = vocab_size
        self._tokenizer_json, self._eos_token_ids = tokenizer_json, list(eos_token_ids)
        self._num_threads = num_threads
        self._compiled: OrderedDict[bytes, Future[Any]] = OrderedDict()  # the ones used last come last
        self._tokenizer_lock = threading.Lock()

    @property
    def num_words(self) -> int:
        """Of a row of bits."""
        return -(-self.vocab_size // 32)

    def compile(self, params: StructuredOutputsParams) -> "Future[Any]":
        """Begin to compile, or find what was compiled; `matcher_of` takes the result. One thread may call this."""
        key = msgspec.msgpack.encode(params)
        future = self._compiled.get(key)
        if future is None or (future.done() and future.exception() is not None):
            future = self._compiled[key] = self._threads.submit(self._compile, params)
        self._compiled.move_to_end(key)
        while len(self._compiled) > MOST_GRAMMARS:
            self._compiled.popitem(last=False)
        return future

    def close(self) -> None:
        """Compile nothing more: the threads end, each after what it is at."""
        if "_threads" in self.__dict__:
            self._threads.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def matcher_of(future: "Future[Any]") -> Matcher:
        """A matcher at the beginning of a compiled grammar. Raises what compiling raised."""
        return Matcher(future.result().deep_copy())

    def _compile(self, params: StructuredOutputsParams) -> Any:
        has_markers = params.thinking is not None or params.structural_tag is not None
        text = grammar_text(params, self._added_tokens if has_markers else {})
        matcher = import_llguidance().LLMatcher(self._tokenizer, text, log_level=0, limits=limits())
        for _ in range(2):  # only with the vocabulary is it known what a token takes; too much is told to the next copy
            copy = matcher.deep_copy()
            if not copy.is_error():
                copy.compute_bitmask()
            if (error := error_of(copy)) is not None:
                raise RequestError(f"structured_outputs cannot be used: {error}", "structured_outputs")
        return matcher

    @property
    def _tokenizer(self) -> Any:
        with self._tokenizer_lock:
            return self._shared_tokenizer

    @cached_property
    def _added_tokens(self) -> dict[str, int]:
        return {token["content"]: token["id"] for token in json.loads(self._tokenizer_json).get("added_tokens", ())}

    @cached_property
    def _shared_tokenizer(self) -> Any:
        """Takes 1 s for 150,000 tokens, so the first request with a grammar makes it, not the start."""
        eos = self._eos_token_ids or None
        return import_llguidance().LLTokenizer(self._tokenizer_json, n_vocab=self.vocab_size, eos_token=eos)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """Threads take the stack size that holds when they start, so all start now."""
        before = threading.stack_size(STACK_BYTES)
        try:
            threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="jaxpaged-grammar")
            barrier = threading.Barrier(self._num_threads + 1)
            for _ in range(self._num_threads):
                threads.submit(barrier.wait)
            barrier.wait()
        finally:
            threading.stack_size(before)
        return threads
