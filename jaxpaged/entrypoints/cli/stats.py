"""What `--stats` prints: how fast it went, and what the engine did for it. Knows the names of the engine's counters."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from jaxpaged.engine.observability.step_times import ProgramWaits
from jaxpaged.entrypoints.terminal import styled
from jaxpaged.messages import RequestOutput

Line = tuple[str, str]


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
