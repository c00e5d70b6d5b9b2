"""What a run measures: which engines complete which workloads of which models, and what is left out by default and why.

Two cores need minutes for what an accelerator does in a second, so the default for a larger model is a selection;
`--workloads` and `--models` ask for anything else. This module starts nothing.
"""

import dataclasses
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from offline_bench import peers
from offline_bench.workloads import WORKLOADS

ENGINES = Path(__file__).parent / "engines"
JAXPAGED = "jaxpaged"
DEFAULT_MODELS = ("llama-110m", "qwen3-0.6b")
QUICK_SCALE = 0.25
# Without --workloads these models, meant for a CPU, run a selection; other models run everything.
SELECTIONS = {"llama-110m": tuple(WORKLOADS), "qwen3-0.6b": ("single", "prefill-1k", "shared")}
FIRST_ROUND_ONLY = ("prefill-8k", "long")
SLOW_PEERS = ("transformers", "transformers-cb")
SLOW_PEERS_RUN = {"llama-110m": ("single", "prefill-1k", "mixed", "shared"), "qwen3-0.6b": ("single", "prefill-1k")}


@dataclasses.dataclass(frozen=True)
class EngineSetting:
    """An engine as it is run: a peer, or jaxpaged with some flags. `missing` says why it cannot run."""

    name: str
    command: tuple[str, ...]
    flags: tuple[str, ...] = ()
    missing: str | None = None
    gguf: str = ""
    variables: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """`workloads`: names by model. `left_out`: sentences for the report. Engines are compared with the first one.

    `selects`: not every engine completes every workload in every round, see `names`.
    """

    engines: tuple[EngineSetting, ...]
    workloads: dict[str, tuple[str, ...]]
    left_out: tuple[str, ...]
    selects: bool = False

    def names(self, engine: EngineSetting, model: str, round_index: int) -> tuple[str, ...]:
        """The workloads of one process. Empty: it need not be started."""
        names = self.workloads[model]
        if not self.selects or model not in SELECTIONS:
            return names
        if engine.name in SLOW_PEERS:
            return () if round_index else tuple(name for name in names if name in SLOW_PEERS_RUN[model])
        return tuple(name for name in names if round_index == 0 or name not in FIRST_ROUND_ONLY)


def make_plan(
    models: list[str], workloads: list[str] | None, peer_names: list[str], variants: list[str], peers_dir: Path
) -> Plan:
    """`workloads` None: the default selection. `variants`: jaxpaged's flags, one text for each way to run it."""
    engines = [jaxpaged_setting(variant) for variant in variants]
    engines += [peer_setting(name, peers_dir) for name in peer_names]
    if workloads is not None:
        return Plan(tuple(engines), {model: tuple(workloads) for model in models}, ())
    chosen = {model: SELECTIONS.get(model, tuple(WORKLOADS)) for model in models}
    left_out = tuple(sentence for model in models if model in SELECTIONS for sentence in selection(model, peer_names))
    return Plan(tuple(engines), chosen, left_out, selects=True)


def selection(model: str, peer_names: list[str]) -> Iterator[str]:
    """What the default leaves out, in sentences."""
    if rest := [name for name in WORKLOADS if name not in SELECTIONS[model]]:
        yield f"{model}: {', '.join(rest)} (slow on a CPU; --workloads asks for them)."
    if once := [name for name in FIRST_ROUND_ONLY if name in SELECTIONS[model]]:
        yield f"{model}: {', '.join(once)} in the first round only."
    if slow := [name for name in SLOW_PEERS if name in peer_names]:
        yield f"{model}: {' and '.join(slow)} run {', '.join(SLOW_PEERS_RUN[model])}, in the first round only."


def jaxpaged_setting(flags: str) -> EngineSetting:
    command = (sys.executable, str(ENGINES / "run_jaxpaged.py"))
    return EngineSetting(f"{JAXPAGED} {flags}".strip(), command, tuple(shlex.split(flags)))


def peer_setting(name: str, peers_dir: Path) -> EngineSetting:
    peer = peers.PEERS[name]
    python = str(peers.python_of(peers_dir, peer.environment))
    missing = None
    if not peers.is_installed(peers_dir, peer.environment):
        missing = f"not installed. Run with --setup-peers {name}."
    return EngineSetting(
        name,
        (python, str(ENGINES / peer.script)),
        missing=missing,
        gguf=peer.gguf,
        variables=tuple(peers.variables_of(peers_dir, peer.environment).items()),
    )


def describe(plan: Plan) -> str:
    """The plan in words, for --list."""
    lines = ["Engines:"]
    lines += [f"  {engine.name}" + (f"  ({engine.missing})" if engine.missing else "") for engine in plan.engines]
    for model, names in plan.workloads.items():
        lines.append(f"{model}:")
        lines += [f"  {name:<12}{WORKLOADS[name].title}" for name in names]
    lines += [f"Left out: {sentence}" for sentence in plan.left_out]
    return "\n".join(lines)
