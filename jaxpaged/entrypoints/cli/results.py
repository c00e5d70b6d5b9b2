"""Results of `jaxpaged generate` on standard output, in the order of the prompts: as text, or as JSON lines.

Text is streamed: what the first unfinished prompt has so far is shown at once, what others have waits until it is
their turn. This module knows results, not how they come about.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import msgspec

from jaxpaged.engine.observability.step_times import ProgramWaits
from jaxpaged.entrypoints.cli.prompts import PromptSource
from jaxpaged.entrypoints.for_trainers import for_trainers
from jaxpaged.entrypoints.terminal import printable, styled
from jaxpaged.messages import CompletionOutput, Logprob, RequestOutput

Line = tuple[str, str]


class TextResults:
    """The text alone for a single prompt; a heading with the prompt before each of several."""

    def __init__(self, sources: Sequence[PromptSource], out: TextIO | None = None):
        self.sources = sources
        self.out = out or sys.stdout
        self.outputs: dict[int, RequestOutput] = {}
        self.failed: set[int] = set()
        self.shown_index = 0  # the first prompt that is not completely shown
        self.num_shown = 0  # characters of its answer

    def update(self, index: int, output: RequestOutput) -> None:
        self.outputs[index] = output
        self._advance()

    def fail(self, index: int, error: str) -> None:
        """The prompt has no result; the error itself goes to standard error."""
        self.failed.add(index)
        self._advance()

    def _advance(self) -> None:
        while self.shown_index < len(self.sources) and self._show_next():
            self.shown_index += 1
            self.num_shown = 0
        self.out.flush()

    def _show_next(self) -> bool:
        """Show what the prompt has now whose turn it is. True when that is all."""
        if self.shown_index in self.failed:
            return True
        output = self.outputs.get(self.shown_index)
        if output is None:
            return False
        single = len(output.outputs) == 1
        if not single and not output.finished:
            return False  # several answers cannot be streamed into one column
        text = output.outputs[0].text if single else "\n".join(f"[{o.index}] {o.text}" for o in output.outputs)
        if self.num_shown == 0 and (text or output.finished):
            self._heading()
        self.out.write(printable(text[self.num_shown :], self.out))
        self.num_shown = len(text)
        if output.finished:
            self.out.write("\n")
        return output.finished

    def _heading(self) -> None:
        if len(self.sources) > 1:
            gap = "\n" if self.shown_index else ""
            self.out.write(f"{gap}{styled('> ' + self.sources[self.shown_index].title, 'bold', self.out)}\n")


class JsonResults:
    """JSON lines, one for every answer (so `n` for a prompt), in the order of the prompts, as early as that allows.

    Keys: index (of the prompt, from 0), sequence (0 to n - 1), prompt, text, token_ids, finish_reason, stop_reason,
    num_prompt_tokens, num_cached_tokens, error; and logprobs, cumulative_logprob, prompt_logprobs when asked for.
    A prompt that failed has one line with an error and no text.
    """

    def __init__(self, sources: Sequence[PromptSource], out: TextIO | None = None):
        self.sources = sources
        self.out = out or sys.stdout
        self.lines: dict[int, list[dict[str, Any]]] = {}
        self.shown_index = 0

    def update(self, index: int, output: RequestOutput) -> None:
        if output.finished:
            self._write(index, [answer_object(output, completion) for completion in output.outputs])

    def fail(self, index: int, error: str) -> None:
        self._write(index, [{"sequence": 0, "text": None, "finish_reason": "error", "error": error}])

    def _write(self, index: int, answers: list[dict[str, Any]]) -> None:
        source = self.sources[index]
        prompt = source.messages or source.token_ids or source.text
        self.lines[index] = [{"index": index, "prompt": prompt, **answer} for answer in answers]
        while self.shown_index in self.lines:
            for line in self.lines.pop(self.shown_index):
                self.out.write(json.dumps(line, ensure_ascii=False) + "\n")
            self.shown_index += 1
        self.out.flush()


def answer_object(output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    """One answer of a finished request as JSON values."""
    answer: dict[str, Any] = {
        "sequence": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "error": output.error,
    }
    answer |= for_trainers(completion)
    if completion.logprobs is not None:
        answer["cumulative_logprob"] = completion.cumulative_logprob
        answer["logprobs"] = [candidates(position) for position in completion.logprobs]
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [position and candidates(position) for position in output.prompt_logprobs]
    return answer


def candidates(position: dict[int, Logprob]) -> dict[str, Any]:
    """Token id -> logprob, rank and text. JSON has no infinity: an impossible token has logprob null."""
    return {str(token_id): finite(msgspec.structs.asdict(logprob)) for token_id, logprob in position.items()}


def finite(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value in (float("inf"), float("-inf")) else value for name, value in values.items()}


# ---- what --stats prints; it knows the names of the engine's counters ------------------------------


def print_stats(
    outputs: Sequence[RequestOutput],
    started: float,
    ended: float,
    executor: Mapping[str, Any],
    waits: ProgramWaits,
    stream: TextIO | None = None,
) -> None:
    """Lines `name  value` on standard error. `started` and `ended` are seconds since the epoch, like request times."""
    stream = stream or sys.stderr
    for name, value in [*request_lines(outputs, started, ended, waits), *executor_lines(executor)]:
        print(styled(f"{name:<9} {value}", "dim", stream), file=stream)


def request_lines(outputs: Sequence[RequestOutput], started: float, ended: float, waits: ProgramWaits) -> list[Line]:
    """Rates of the whole command, without the time in which it waited for programs to be compiled.

    Prefill is timed from the start to the last request's first token, decode from the earliest first token to the
    end: for several requests the two overlap.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    lengths = [len(completion.token_ids) for output in outputs for completion in output.outputs]
    firsts = [o.metrics.first_token_time for o in outputs if o.metrics and o.metrics.first_token_time is not None]
    decoded = sum(max(length - 1, 0) for length in lengths)
    preempted = sum(output.metrics.num_preemptions for output in outputs if output.metrics)
    waited = waits.between(started, ended)
    compiling = f", {waited:.2f} s of it waiting for programs to be compiled" if waited >= 0.005 else ""

    def seconds(begin: float, end: float) -> float:
        return end - begin - waits.between(begin, end)

    return [
        ("requests", f"{len(outputs)} in {ended - started:.2f} s{compiling}, {preempted} preemptions"),
        ("prefill", f"{prompt - cached} tokens{rate(prompt - cached, seconds(started, max(firsts, default=ended)))}"),
        ("cache", f"{cached} of {prompt} prompt tokens were in the prefix cache"),
        ("decode", f"{decoded} tokens{rate(decoded, seconds(min(firsts, default=started), ended))}"),
    ]


def executor_lines(executor: Mapping[str, Any]) -> list[Line]:
    """Padding, buckets and programs. Large programs come first: until all are there, steps are padded to these."""
    computed, padding = executor["scheduled_tokens"], executor["padded_tokens"]
    waste = f"{padding / max(executor['steps'], 1):.1f} tokens of a step were padding"
    if executor["ordinary_programs_ready"] < executor["ordinary_programs"]:
        waste += ": programs for smaller steps are still being compiled, and pad less"
    else:
        waste += f", {padding / max(computed + padding, 1):.0%} of all"
    buckets = ", ".join(f"{count} of {size}" for size, count in executor["bucket_steps"].items())
    return [
        ("steps", f"{executor['steps']}; by tokens they were padded to: {buckets or 'none'}; {waste}"),
        (
            "programs",
            f"{executor['programs_ready']} of {executor['programs']} ready, {executor['compile_seconds']:.1f} s of "
            f"compiling, {executor['recompiles']} recompiles",
        ),
    ]


def rate(tokens: int, seconds: float) -> str:
    return f", {tokens / seconds:.0f} tokens/s" if tokens and seconds > 0 else ""
