"""The results of one request on their way to its consumer.

A consumer that is slower than the engine finds what came meanwhile as one result: nothing queues up. One that keeps up
may leave a function that takes results where they arise, so that nobody is woken for them. This module knows neither
engines nor sockets.
"""

import asyncio
from collections.abc import Callable

import msgspec

from jaxpaged.messages import CompletionOutput, RequestOutput, SamplingMask

Taker = Callable[[RequestOutput], bool]
"""Takes a result at once, and for good; False: not now, so it comes by the way of all others."""


class OutputStream:
    """For one producer and one consumer in the same event loop. `by_delta`: results hold only what is new.

    `take` is asked first for every result that comes while the consumer waits in `get`, but for the last one, and for
    those with log probabilities of the prompt, which take long to read. Where it raises, this stream fails.
    """

    def __init__(self, by_delta: bool, take: Taker | None = None):
        self._by_delta = by_delta
        self._take = take
        self._waiting: RequestOutput | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future | None = None  # of a consumer who came before there was something

    def put(self, output: RequestOutput) -> None:
        """The next result."""
        waiter, take = self._waiter, self._take
        if take is not None and waiter is not None and not output.finished and output.prompt_logprobs is None:
            try:
                if not waiter.done() and take(output):
                    return
            except Exception as error:
                self.fail(error)
                return
        before = self._waiting
        self._waiting = output if before is None or not self._by_delta else joined(before, output)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """There will be no more results. What waits is not given out: it may be part of a word."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """What came since the last call, as soon as there is something. Raises the error given to `fail`."""
        if self._waiting is None and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        output, self._waiting = self._waiting, None
        assert output is not None, "it was woken for nothing"
        return output

    def _wake(self) -> None:
        """Wake a consumer who has dealt with all before, and waits for more."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two results of the same request in one, each of which holds what was new."""
    completions = {completion.index: completion for completion in first.outputs}
    for new in second.outputs:
        old = completions.get(new.index)
        completions[new.index] = new if old is None else joined_completion(old, new)
    return msgspec.structs.replace(
        second,
        outputs=[completions[index] for index in sorted(completions)],
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
        error=first.error or second.error,
    )


def joined_completion(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=[*(first.logprobs or ()), *second.logprobs] if second.logprobs is not None else first.logprobs,
        processed_logprobs=[*(first.processed_logprobs or ()), *(second.processed_logprobs or ())] or None,
        sampling_mask=joined_mask(first.sampling_mask, second.sampling_mask),
    )


def joined_mask(first: SamplingMask | None, second: SamplingMask | None) -> SamplingMask | None:
    return second if first is None or second is None else SamplingMask([*first.token_ids, *second.token_ids])
