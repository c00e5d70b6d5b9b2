"""Has prefill engines compute prompts: which one, what it says of that, and what becomes of it where it does not.

An engine is asked for a stream, which says where a prompt is lent before it is computed, so that a decode engine
fetches it meanwhile. One that does not say so in streams is asked for whole responses from then on.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Raw

from jaxpaged.entrypoints.proxy.backends import Backend, Backends
from jaxpaged.entrypoints.proxy.engine_response import ELSEWHERE, MOST_WHOLE, EngineResponse
from jaxpaged.entrypoints.proxy.handing_over import Asked, first_params, for_prefill, params_in


@dataclass
class Prompt:
    """Where a prompt is lent, None: nowhere, and the `answer` of the engine that may still compute it."""

    params: Raw | None = None
    response: EngineResponse | None = None

    def leave(self) -> None:
        """Nobody goes on from it."""
        if self.response is not None:
            self.response.close()


class Prompts:
    """Those of a proxy, which counts in `counts`. `waits`: until they are computed."""

    def __init__(self, backends: Backends, counts: Counter[str], timeout: float, *, waits: bool):
        self._backends, self._counts, self._timeout, self._waits = backends, counts, timeout, waits

    async def computed(self, asked: Asked, beginnings: Sequence[bytes], headers: Mapping[str, str]) -> Prompt:
        """What a prefill engine says of a prompt: nothing where none computes it."""
        tried: list[Backend] = []
        while (backend := self._backends.choose(beginnings, tried)) is not None:
            tried.append(backend)
            is_stream = backend.says_early and not self._waits
            status, prompt = await self._ask(backend, asked, headers, is_stream)
            if is_stream and prompt.params is None and status == 200:
                status, prompt = await self._ask(backend, asked, headers, is_stream=False)
                backend.says_early = prompt.params is None
            if status == 200:
                self._backends.remember(beginnings, backend)
                self._counts["handed_over"] += prompt.params is not None
                return prompt
            self._counts["prefill_failures"] += 1
            if status and status not in ELSEWHERE:
                break  # a decode engine says what is wrong with it
        return Prompt()

    async def _ask(
        self, backend: Backend, asked: Asked, headers: Mapping[str, str], is_stream: bool
    ) -> tuple[int, Prompt]:
        """The status of its response, 0 where there is none, and what it says."""
        body = for_prefill(asked, is_stream=is_stream)
        response, params = EngineResponse(backend, asked.path, body, headers, self._timeout), None
        try:
            status, _ = await response.begun()
            if status == 200 and is_stream:
                params = await first_params(response.pieces(), MOST_WHOLE)
            elif status == 200:
                content, rest = await response.some(MOST_WHOLE)
                if rest is not None:
                    raise OSError(f"it says more than {MOST_WHOLE} bytes of one token")
                params = params_in(content)
            backend.breaker.succeeded()
        except OSError as error:
            backend.failed(error)
            status = 0
        finally:
            if params is None:
                response.close()
        return status, Prompt(params, response)
