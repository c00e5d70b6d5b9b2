"""The report of `bench_kernel.py` as text. Knows what a row holds, and not where it comes from.

A row has `op`, `case`, `what` and either the figures of `figures` or an `error`.
"""

from typing import Any

COLUMNS = ("case", "what", "ms", "GB", "TFLOP", "bandwidth", "matmul", "time")


def figures(num_bytes: int, flops: int, seconds: float, own: float | None, report: dict[str, Any]) -> dict[str, Any]:
    """What a row says of a call that takes `seconds`, where ours takes `own`, on a device with the report's speeds."""
    return {
        "milliseconds": seconds * 1e3,
        "bytes": num_bytes,
        "flops": flops,
        "bandwidth_share": num_bytes / seconds / report["bandwidth"],
        "matmul_share": flops / seconds / report["matmul"],
        "times_ours": None if own is None else seconds / own,
    }


def header(report: dict[str, Any]) -> str:
    return (
        f"kernels on {report['device']}, {report['date']}, jax {report['jax']}, sizes: {report['sizes']}\n"
        f"measured: {report['bandwidth'] / 1e9:.0f} GB/s of memory, {report['matmul'] / 1e12:.3g} TFLOP/s of bfloat16"
    )


def line(row: dict[str, Any]) -> str:
    case, what, *rest = _cells(row)
    return f"{case:42} {what:60} {'  '.join(f'{cell:>8}' for cell in rest)}"


def markdown(report: dict[str, Any]) -> str:
    """A table for each op, with what it was measured on; a case's rows stand together, ours first."""
    lines = [*header(report).split("\n"), ""]
    for op in dict.fromkeys(row["op"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["op"] == op]
        order = {case: i for i, case in enumerate(dict.fromkeys(row["case"] for row in rows))}
        rows.sort(key=lambda row: order[row["case"]])
        table = [COLUMNS, ["---"] * len(COLUMNS), *(_cells(row) for row in rows)]
        lines += [f"## {op}", "", *(f"| {' | '.join(row)} |" for row in table), ""]
    return "\n".join([*lines, *report["notes"], ""])


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["case"], row["what"], f"failed: {row['error']}", *[""] * (len(COLUMNS) - 3)]
    times = "" if row["times_ours"] is None else f"{row['times_ours']:.2f} x"
    product = [f"{row['flops'] / 1e12:.4f}", f"{row['matmul_share']:.0%}"] if row["flops"] else ["", ""]
    return [
        row["case"],
        row["what"],
        f"{row['milliseconds']:.3f}",
        f"{row['bytes'] / 1e9:.3f}",
        product[0],
        f"{row['bandwidth_share']:.0%}",
        product[1],
        times,
    ]
