"""A plan in words, for a terminal, as JSON, and as a picture of the memory of a device.

It knows the plan and nothing of how it was made.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxpaged.tools.pictures import canvas
from jaxpaged.tools.pictures.tables import Line, text_table
from jaxpaged.tools.planning.plan import Plan, PlannedProgram, Speed, StagePlan

BAR = 48
"""Characters of the memory bar."""
COLORS = {"weights": canvas.BLUE, "KV blocks": canvas.GREEN, "temporaries": canvas.ORANGE, "free": canvas.PALE}


def json_report(plan: Plan, more: Mapping[str, Any] | None = None) -> str:
    """All of the plan, what it says about fitting, and `more`, as one JSON object."""
    values = msgspec.to_builtins(plan, str_keys=True) | {"fits": plan.fits, "kv_bytes": plan.kv_bytes, **(more or {})}
    return msgspec.json.format(msgspec.json.encode(values)).decode()


def text_report(plan: Plan) -> str:
    """The plan for people: what fits, the programs, the bounds of speed, what was assumed, what to change."""
    split = f", the model split over {plan.devices_per_engine} of them" if plan.num_devices > 1 else ""
    if plan.stages:
        split += f", {len(plan.stages)} stages of {plan.tensor_parallel_size}"
    if plan.num_ranks > 1:
        split += f", {plan.num_ranks} attention ranks of {plan.tensor_parallel_size} with KV blocks of their own"
    parts = [
        f"{plan.model} on {plan.target}: {count(plan.num_devices, 'device')} ({plan.device.name}){split}",
        "  ".join(f"{name}={value}" for name, value in plan.options.items()),
        memory_report(plan),
    ]
    if plan.programs:
        parts.append(programs_report(plan.programs))
    if plan.num_blocks > plan.blocks_per_request:
        parts += [concurrency_report(plan), speed_report(plan)]
    parts.append("\n".join(["assumed", *(f"  - {line}" for line in plan.assumptions)]))
    verdict = "it fits" if plan.fits else "IT DOES NOT RUN" if plan.obstacles else "IT DOES NOT FIT"
    parts.append("\n".join([verdict, *(f"  - {line}" for line in plan.advice)]))
    return "\n\n".join(parts)


def memory_parts(plan: Plan) -> list[tuple[str, int]]:
    """(what, bytes) of a device, in the order in which it is drawn. `free` is what utilization leaves alone."""
    used = plan.weight_bytes + plan.state_bytes + plan.reserved_bytes + plan.kv_bytes
    return [
        ("weights", plan.weight_bytes),
        ("KV blocks", plan.kv_bytes),
        ("temporaries", plan.state_bytes + plan.reserved_bytes),
        ("free", max(plan.device.memory - used, 0)),
    ]


def memory_report(plan: Plan) -> str:
    kinds = "compiled" if plan.programs else "estimated"
    lines: list[Line] = [
        ("weights", gib(plan.weight_bytes)),
        ("KV blocks", f"{gib(plan.kv_bytes)}: {plan.num_blocks:,} blocks of {plan.block_bytes / 2**10:,.0f} KiB"),
        ("requests' state", gib(plan.state_bytes)),
        ("temporaries", f"{gib(plan.reserved_bytes)} set aside; {kinds}: {gib(plan.temporary_bytes)}"),
    ]
    if (encoder := plan.encoder) is not None:
        embeds = f"{encoder.cache_embeds:,} embeddings in {mib(encoder.cache_bytes)}"
        tower = f"{gib(encoder.weight_bytes)} of the weights are the tower's; the encoder cache keeps {embeds}"
        one = f"the largest, of {encoder.picture_embeds:,} embeddings, takes {encoder.picture_flops / 1e12:,.2f} TFLOP"
        lines.append(("pictures", f"{tower}; {one}"))
    if plan.programs:
        lines.append(("code", f"{gib(plan.code_bytes)} in {count(len(plan.programs), 'program')}"))
    lines.append(("usable", f"{gib(plan.usable_bytes)} of {gib(plan.device.memory)}"))
    heading = "memory per device of the stage that needs most" if plan.stages else "memory per device"
    report = "\n".join([heading, memory_bar(plan), indented(text_table(lines))])
    return f"{report}\n\n{stages_report(plan.stages)}" if plan.stages else report


def stages_report(stages: Sequence[StagePlan]) -> str:
    """What a device of each stage has. All have as many KV blocks."""
    rows = [("stage", "layers", "weights", "KV blocks", "state", "temporaries", "code")]
    for i, each in enumerate(stages, start=1):
        sizes = (each.weight_bytes, each.kv_bytes, each.state_bytes, each.temporary_bytes, each.code_bytes)
        rows.append((str(i), str(each.num_layers), *map(gib, sizes)))
    return "\n".join(["memory per device, by stage", *columns(rows)])


def memory_bar(plan: Plan) -> str:
    """One line: `[####KKKKKKtt....]`, or what is missing."""
    total = max(sum(size for _, size in memory_parts(plan)), 1)
    signs = {"weights": "#", "KV blocks": "K", "temporaries": "t", "free": "."}
    cells = "".join(signs[what] * round(BAR * size / total) for what, size in memory_parts(plan))
    return f"  [{cells}]  # weights  K KV blocks  t temporaries  . free"


def concurrency_report(plan: Plan) -> str:
    lines = [(f"{context:,} tokens", count(n, "request")) for context, n in plan.concurrency.items()]
    return "\n".join(["requests that fit at a time, by length", indented(text_table(lines))])


def programs_report(programs: Sequence[PlannedProgram]) -> str:
    rows = [("program", "compiled in", "temporaries", "code", "memory moved", "collectives")]
    for program in programs:
        if program.error:
            rows.append((program.name, f"{program.compile_seconds:.1f} s", "does not compile", "", "", ""))
            continue
        collectives = ", ".join(f"{n} {name}" for name, n in program.collectives.items()) or "none"
        if program.hidden_bytes:
            share = program.waited_bytes / (program.waited_bytes + program.hidden_bytes)
            collectives += f" ({share:.0%} waited for)"
        if program.sent_bytes:
            collectives += f", {mib(program.sent_bytes)} to another stage"
        sizes = (mib(program.temporary_bytes), mib(program.code_bytes), mib(program.memory_bytes))
        rows.append((program.name, f"{program.compile_seconds:.1f} s", *sizes, collectives))
    return "\n".join(["programs", *columns(rows)])


def speed_report(plan: Plan) -> str:
    rows = [("tokens/s", "requests", "context", "estimated", "each", "at most", "bounded by")]
    rows += [speed_row("decode", speed) for speed in plan.decode]
    rows += [speed_row("prefill", speed) for speed in plan.prefill]
    return "\n".join(["speed of one engine, estimated from compiled programs, and an upper bound", *columns(rows)])


def speed_row(what: str, speed: Speed) -> tuple[str, ...]:
    estimated = (f"{speed.estimated:,.0f}", f"{speed.estimated / speed.num_requests:,.0f}")
    shown = estimated if speed.estimated else ("-", "-")
    return (what, str(speed.num_requests), f"{speed.context:,}", *shown, f"{speed.tokens_per_second:,.0f}", speed.limit)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with their cells below each other."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]


def indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def draw_memory(plan: Plan) -> Any:
    """A matplotlib figure. What does not fit stands beyond the line that marks the end of the memory."""
    figure = canvas.new_figure(9, 2.4)
    axes = figure.subplots()
    left = 0.0
    for what, size in memory_parts(plan):
        width = size / 2**30
        axes.barh(0, width, left=left, color=COLORS[what], label=f"{what}  {gib(size)}")
        left += width
    memory = plan.device.memory / 2**30
    axes.axvline(memory, color=canvas.INK, linewidth=1.2)
    axes.axvline(plan.usable_bytes / 2**30, color=canvas.INK, linewidth=1.0, linestyle=":")
    axes.set_xlim(0, max(left, memory) * 1.02)
    axes.set_ylim(-0.6, 0.6)
    axes.set_yticks([])
    axes.set_xlabel("GiB of one device; dotted: what gpu_memory_utilization allows", fontsize=9, color=canvas.INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=canvas.INK)
    verdict = "" if plan.fits else ": does not fit"
    title = f"{plan.model} on {plan.target}, {plan.devices_per_engine} x {plan.device.name}{verdict}"
    axes.set_title(title, fontsize=12, color=canvas.INK)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=4, frameon=False, fontsize=9)
    return figure
