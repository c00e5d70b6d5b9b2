"""The report as Markdown: rates, ratios, starts and memory, shares of the machine's limits, and what failed.

It reads `Results` and nothing else: the same report can be made again from the JSON file.
"""

from offline_bench.checkpoints import MODELS
from offline_bench.results import Results
from offline_bench.roofline import bandwidth, best, decode_share, matmul_peak, prefill_share

METRICS = {
    "decode": "output tokens/s after the first",
    "prefill": "prompt tokens/s up to the first output token",
    "output": "output tokens/s",
}
UNITS = {"bandwidth": ("GB/s", 1e9), "matmul": ("GFLOP/s", 1e9)}
NOTHING = "-"


def markdown(results: Results) -> str:
    parts = ["# Offline benchmark", introduction(results), "## The machine's limits, as XLA shows them"]
    parts.append(roofline_table(results))
    for model in results.models:
        parts += [f"## {model}", facts_of(model), rate_table(results, model), ratio_table(results, model)]
        parts += [start_table(results, model), share_table(results, model), notes(results, model)]
    if results.left_out:
        parts.append("## Left out\n\n" + "\n".join(f"* {sentence}" for sentence in results.left_out))
    return "\n\n".join(part for part in parts if part) + "\n"


def introduction(results: Results) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    return (
        f"`{results.command}`\n\n{machine}. Every engine ran in fresh processes, which took turns; the best round "
        "counts. Random weights in bfloat16, prompts as token ids, greedy, no early end."
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def facts_of(model: str) -> str:
    shape = MODELS[model]
    return (
        f"{shape.num_parameters / 1e6:,.1f} million weights; a decode step reads "
        f"{shape.weight_bytes_per_step / 1e6:,.1f} MB of them, a prompt token takes "
        f"{shape.flops_per_prefill_token / 1e6:,.1f} MFLOP."
    )


def roofline_table(results: Results) -> str:
    rows = []
    for (kind, dtype), figure in best(results.roofline).items():
        unit, scale = UNITS[kind]
        rows.append([kind, dtype, f"{figure['per_second'] / scale:,.1f} {unit}", figure["shape"]])
    return table(["limit", "type", "best", "shape"], rows) if rows else "Not measured."


def rate_table(results: Results, model: str) -> str:
    workloads = results.models[model]
    lines = [f"* {name}: {sizes['title']}; {METRICS[sizes['metric']]}" for name, sizes in workloads.items()]
    rows = []
    for engine in results.engines:
        row = [number(results.best_rate(model, engine, name)) for name in workloads]
        rows.append([engine, *row])
    return "\n".join(lines) + "\n\nTokens per second:\n\n" + table(["engine", *workloads], rows)


def ratio_table(results: Results, model: str) -> str:
    """How many times the first engine is as fast as each other one."""
    workloads, (first, *others) = results.models[model], results.engines
    if not others:
        return ""
    rows = [[engine, *(ratio(results, model, engine, name) for name in workloads)] for engine in others]
    return f"{first} is this many times as fast as:\n\n" + table(["engine", *workloads], rows)


def ratio(results: Results, model: str, engine: str, workload: str) -> str:
    mine, its = (results.best_rate(model, name, workload) for name in (results.engines[0], engine))
    return f"{mine / its:.2f}" if mine and its else NOTHING


def start_table(results: Results, model: str) -> str:
    batches = [name for name in ("single", "mixed", "long") if name in results.models[model]]
    starts = ("cold start, s", "first minute, tokens/s", "of later", "warm start, s")
    header = ["engine", *starts, *(f"first token of {name}, s" for name in batches)]
    rows = []
    for engine in results.engines:
        same, total = results.same_first_tokens(model, engine)
        peak = results.peak_bytes(model, engine)
        early, later = results.first_minute(model, engine) or (None, None)
        rows.append(
            [
                engine,
                seconds(results.start_seconds(model, engine, True)),
                number(early),
                percent(early / later if later else None),
                seconds(results.start_seconds(model, engine, False)),
                *(seconds(results.first_token_seconds(model, engine, name)) for name in batches),
                f"{peak / 2**30:.2f}" if peak else NOTHING,
                f"{same} of {total}" if total else NOTHING,
            ]
        )
    about = (
        "A start lasts from the process's own to the first token of a small request, cold with an empty compilation "
        "cache. In the minute after that one there are 4 requests at a time, of 256 tokens with answers of 32; then "
        "the same later. First tokens are medians over requests. Same first tokens: requests that begin as the first "
        "engine's:"
    )
    return f"{about}\n\n" + table([*header, "peak memory, GiB", "same first tokens"], rows)


def share_table(results: Results, model: str) -> str:
    """Shares of bandwidth and of the matmul peak, where the workloads show them."""
    shape, figures = MODELS[model], results.roofline
    measures = [
        (name, decode_share if sizes["metric"] == "decode" else prefill_share)
        for name, sizes in results.models[model].items()
        if sizes["metric"] != "output"
    ]
    if not figures or not measures:
        return ""
    rows = []
    for engine in results.engines:
        rates = [(share, results.best_rate(model, engine, name)) for name, share in measures]
        rows.append([engine, *(percent(share(shape, rate, figures)) if rate else NOTHING for share, rate in rates)])
    peak = (matmul_peak(figures) or 0) / 1e9
    limits = f"{(bandwidth(figures) or 0) / 1e9:.1f} GB/s in decode, {peak:,.0f} GFLOP/s of bfloat16 in prefill"
    about = f"Share of the machine's limits ({limits}), counting 2 bytes per weight, quantised or not"
    return f"{about}:\n\n" + table(["engine", *(name for name, _ in measures)], rows)


def notes(results: Results, model: str) -> str:
    """How far rounds were apart, and what failed."""
    lines = []
    if spread := widest_spread(results, model):
        low, engine, workload = spread
        lines.append(f"* Rounds differed most in {workload} of {engine}: the slowest had {percent(low)} of the best.")
    lines += [f"* Failed: {sentence}" for sentence in results.failures(model)]
    return "\n".join(lines)


def widest_spread(results: Results, model: str) -> tuple[float, str, str] | None:
    """(slowest over fastest round, engine, workload) where rounds were furthest apart."""
    found = []
    for engine in results.engines:
        for workload in results.models[model]:
            rates = results.rates(model, engine, workload)
            if len(rates) > 1 and max(rates) > 0:
                found.append((min(rates) / max(rates), engine, workload))
    return min(found, default=None)


def number(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def seconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.0f} %"
