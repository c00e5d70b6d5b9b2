"""Figures from what the processes said: tokens per second, seconds to the first token, memory, agreement.

A `Results` is all that a run measured; it is written as JSON and can be read back. Nothing is measured or drawn here.
"""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Results:
    """`models`: workloads by model, each with its title, metric and sizes. `runs`: one entry per process.

    A run has `model`, `engine`, `round`, `events` and `error`. `roofline` are the figures of `run_roofline.py`.
    """

    machine: dict[str, Any]
    command: str
    engines: list[str]
    models: dict[str, dict[str, dict[str, Any]]]
    left_out: list[str] = dataclasses.field(default_factory=list)
    roofline: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def write(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Results":
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def runs_of(self, model: str, engine: str) -> list[dict[str, Any]]:
        return [run for run in self.runs if run["model"] == model and run["engine"] == engine]

    def events(self, model: str, engine: str, event: str) -> list[tuple[int, dict[str, Any]]]:
        """(round, event) of all events with this name."""
        return [
            (run["round"], found)
            for run in self.runs_of(model, engine)
            for found in run["events"]
            if found["event"] == event
        ]

    # ---- one model and engine ----------------------------------------------------------------------

    def rates(self, model: str, engine: str, workload: str) -> list[float]:
        """Tokens per second in every round that was completed, by the workload's own metric."""
        sizes = self.models[model][workload]
        found = [run for _, run in self.events(model, engine, "run") if run["workload"] == workload]
        return [rate(sizes, run) for run in found]

    def best_rate(self, model: str, engine: str, workload: str) -> float | None:
        return max(self.rates(model, engine, workload), default=None)

    def start_seconds(self, model: str, engine: str, cold: bool) -> float | None:
        """From the start of the process to the first token of a small request. Warm: the best of the later rounds."""
        found = self.events(model, engine, "first_token")
        return min((event["seconds"] for index, event in found if (index == 0) == cold), default=None)

    def first_minute(self, model: str, engine: str) -> tuple[float, float] | None:
        """Output tokens per second right after the first start, and of the same work once nothing is compiled."""
        found = [event for _, event in self.events(model, engine, "first_minute")]
        return (found[0]["per_second"], found[0]["later_per_second"]) if found else None

    def first_token_seconds(self, model: str, engine: str, workload: str) -> float | None:
        """Median over the requests, in the best round."""
        found = [run for _, run in self.events(model, engine, "run") if run["workload"] == workload]
        return min((statistics.median(run["first_seconds"]) for run in found), default=None)

    def peak_bytes(self, model: str, engine: str) -> int | None:
        """The most memory of any round, up to the last workload that was completed."""
        found = [event for name in ("run", "end") for _, event in self.events(model, engine, name)]
        return max((event["peak_bytes"] for event in found if "peak_bytes" in event), default=None)

    def same_first_tokens(self, model: str, engine: str) -> tuple[int, int]:
        """(how many, of how many) requests whose first token is the one that the first engine gave."""
        expected = {
            (index, run["workload"]): run["first_token_ids"]
            for index, run in self.events(model, self.engines[0], "run")
        }
        pairs = [
            (mine, its)
            for index, run in self.events(model, engine, "run")
            for mine, its in zip(run["first_token_ids"], expected.get((index, run["workload"]), []))
        ]
        return sum(mine == its for mine, its in pairs), len(pairs)

    def failures(self, model: str) -> list[str]:
        """One sentence for every workload or process that failed, without repetitions."""
        found: dict[str, None] = {}
        for run in self.runs:
            if run["model"] != model:
                continue
            for event in run["events"]:
                if event["event"] == "failed":
                    found[f"{run['engine']}, {event['workload']}: {event['error']}"] = None
            if run["error"]:
                found[f"{run['engine']}, {stage(run)}: {run['error']}"] = None
        return list(found)


def rate(sizes: dict[str, Any], run: dict[str, Any]) -> float:
    """Tokens per second of one run. `sizes`: the workload's metric, tokens_in and tokens_out."""
    if sizes["metric"] == "prefill":
        return sizes["tokens_in"] / max(run["first_seconds"])
    if sizes["metric"] == "decode":
        first, last = run["first_seconds"][0], run["last_seconds"][0]
        return (sizes["tokens_out"] - 1) / (last - first) if last > first else 0.0
    return sizes["tokens_out"] / run["total_seconds"]


def stage(run: dict[str, Any]) -> str:
    """How far a process came before it failed."""
    last = run["events"][-1] if run["events"] else None
    if last is None:
        return "while it started"
    after = last.get("workload", last["event"].replace("_", " "))
    return f"after {after}"
