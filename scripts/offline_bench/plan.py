"""What a run measures: which engines complete which workloads of which models, and what is left out by default and why.

Two cores need minutes for what an accelerator does in a second, so the default for a larger model is a selection;
`--workloads` and `--models` ask for anything else. This module starts nothing.
"""

import dataclasses
import shlex
import sys
from pathlib import Path

from offline_bench import peers
from offline_bench.workloads import WORKLOADS

ENGINES = Path(__file__).parent / "engines"
JAXPAGED = "jaxpaged"
DEFAULT_MODELS = ("llama-110m", "qwen3-0.6b")
# Without --workloads a model runs these; a model that is not here runs all.
DEFAULT_WORKLOADS = {"qwen3-0.6b": ("single", "prefill-1k", "mixed")}
QUICK_SCALE = 0.25


@dataclasses.dataclass(frozen=True)
class EngineSetting:
    """An engine as it is run: a peer, or jaxpaged with some flags. `missing` says why it cannot run."""

    name: str
    command: tuple[str, ...]
    flags: tuple[str, ...] = ()
    missing: str | None = None
    gguf_python: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """`workloads`: names by model. `left_out`: sentences for the report. Engines are compared with the first one."""

    engines: tuple[EngineSetting, ...]
    workloads: dict[str, tuple[str, ...]]
    left_out: tuple[str, ...]


def make_plan(
    models: list[str], workloads: list[str] | None, peer_names: list[str], variants: list[str], peers_dir: Path
) -> Plan:
    """`workloads` None: the default selection. `variants`: jaxpaged's flags, one text for each way to run it."""
    engines = [jaxpaged_setting(variant) for variant in variants]
    engines += [peer_setting(name, peers_dir) for name in peer_names]
    chosen, left_out = {}, []
    for model in models:
        chosen[model] = tuple(workloads or DEFAULT_WORKLOADS.get(model, WORKLOADS))
        if workloads is None and (rest := [name for name in WORKLOADS if name not in chosen[model]]):
            left_out.append(f"{model}: {', '.join(rest)}, which take long on a CPU. Ask for them with --workloads.")
    return Plan(tuple(engines), chosen, tuple(left_out))


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
        name, (python, str(ENGINES / peer.script)), missing=missing, gguf_python=python if peer.needs_gguf else None
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
