"""Many prompts through one engine: submit them all, step until none is left, report each failure on its own.

This module knows neither flags' origins nor how results are printed.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxpaged.engine.input.picture_parts import has_pictures
from jaxpaged.engine.input.prompts import ChatWithPictures
from jaxpaged.entrypoints.cli.adapters import chosen_adapter, with_adapter
from jaxpaged.entrypoints.cli.engine import Engine, default_max_tokens, has_chat_template
from jaxpaged.entrypoints.cli.flags import sampling_options
from jaxpaged.entrypoints.cli.images import url_of, with_pictures
from jaxpaged.entrypoints.cli.prompts import PromptSource
from jaxpaged.entrypoints.terminal import ProgressLine, complain
from jaxpaged.errors import RequestError
from jaxpaged.messages import RequestOutput

TITLE_LENGTH = 40


class Results(Protocol):
    """Where results go: `results.TextResults` or `results.JsonResults`."""

    def update(self, index: int, output: RequestOutput) -> None: ...
    def fail(self, index: int, error: str) -> None: ...


class Batch:
    """The prompts of one command. A request's id is the index of its prompt."""

    def __init__(
        self,
        engine: Engine,
        results: Results,
        progress: ProgressLine,
        params_of: Callable[[Mapping[str, Any], bool], Any],
    ):
        """`params_of` makes of the given sampling parameters what the engine takes, for a chat or for a text."""
        self.engine = engine
        self.results = results
        self.progress = progress
        self.params_of = params_of
        self.sources: Sequence[PromptSource] = ()
        self.finished: list[RequestOutput] = []
        self.num_failed = 0
        self.limits: dict[int, int] = {}  # prompt -> tokens after which its answer ends because nothing else was said
        self.num_cut = 0  # answers that ended there

    def submit(self, sources: Sequence[PromptSource], args: argparse.Namespace) -> None:
        """Hand every prompt to the engine; those that it refuses are reported, and the others go on."""
        self.sources = sources
        chat = has_chat_template(self.engine) and not args.raw
        given = sampling_options(args)
        adapter = with_adapter(chosen_adapter(args))
        is_limited = "max_tokens" not in {**self.engine.input_processor.defaults.sampling, **given}
        for index, source in enumerate(sources):
            try:
                prompt = self._engine_prompt(source, chat, args.system, args.image)
                is_chat = chat or source.messages is not None
                params = self.params_of(given, is_chat)
                if is_limited:
                    self.limits[index] = default_max_tokens(is_chat)
                self.engine.add_request(str(index), prompt, params, **adapter)
            except RequestError as error:
                self._fail(index, str(error))

    def _engine_prompt(
        self, source: PromptSource, chat: bool, system: str | None, images: Sequence[dict[str, Any]]
    ) -> Any:
        """What `add_request` takes. Raises RequestError."""
        if source.error is not None:
            raise source.error
        if source.token_ids is not None:
            return {"prompt_token_ids": source.token_ids}
        messages = source.messages
        if messages is None:
            if not chat and system is None:
                return raw_prompt(source.text, images)
            if not source.text:
                raise RequestError("the prompt is empty. Give it at least one character.", "prompt")
            messages = [{"role": "user", "content": source.text}]
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        if images:
            messages = with_pictures(messages, images)
        if has_pictures(messages):  # they are read when their turn comes
            return {"chat": ChatWithPictures(messages, {})}
        return self.engine.input_processor.chat_prompt(messages)

    def finish(self) -> None:
        """Step until every request has ended. An interrupt aborts them all."""
        try:
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    self._take(output)
            self._remark_on_cuts()
        except KeyboardInterrupt:
            self.engine.abort_request([str(index) for index in range(len(self.sources))])
            raise

    def _take(self, output: RequestOutput) -> None:
        self.progress.close()
        index = int(output.request_id)
        self.results.update(index, output)
        if output.finished:
            self.finished.append(output)
            limit = self.limits.get(index)
            self.num_cut += sum(
                each.finish_reason == "length" and len(each.token_ids) == limit for each in output.outputs
            )
            if output.error is not None:
                self._complain(index, output.error)

    def _remark_on_cuts(self) -> None:
        """Say once that answers ended at a length that nobody asked for."""
        if self.num_cut:
            limits = " or ".join(map(str, sorted(set(self.limits.values()))))
            were = "1 answer was" if self.num_cut == 1 else f"{self.num_cut} answers were"
            complain(
                "jaxpaged generate",
                f"{were} cut after {limits} tokens. For longer ones: --max-tokens N, or none "
                "for as many as the context holds.",
            )

    def _fail(self, index: int, error: str) -> None:
        self.progress.close()
        self.results.fail(index, error)
        self._complain(index, error)

    def _complain(self, index: int, error: str) -> None:
        self.num_failed += 1
        title = " ".join(self.sources[index].title.split())
        if len(title) > TITLE_LENGTH:
            title = title[: TITLE_LENGTH - 3] + "..."
        complain("jaxpaged generate", f"prompt {index} ({title!r}): {error}")


def raw_prompt(text: str | None, images: Sequence[dict[str, Any]]) -> Any:
    """A text that is continued as it is: it has the model's own mark for each picture."""
    if not images:
        return text
    return {"prompt": text, "multi_modal_data": {"image": [url_of(part) for part in images]}}
