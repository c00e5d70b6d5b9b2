"""`jaxpaged collect-env`: versions, machine and settings, to go with a report of a problem.

Devices are asked for in a process of its own, so that one that hangs or crashes is a line of the report. Of variables
only those with known names are shown, and of secrets only that they are set.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxpaged import __version__
from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.machine import gibibytes, gpus, host_memory_bytes, output_of

PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "llvmlite",
    "flax",
    "numpy",
    "ml_dtypes",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "orbax-checkpoint",
    "llguidance",
    "msgspec",
    "pyzmq",
    "starlette",
    "uvicorn",
    "httptools",
    "uvloop",
    "grpcio",
    "protobuf",
    "ray",
    "redis",
    "obstore",
    "matplotlib",
    "jax-triton",
    "triton",
    "torch",
)
VARIABLES = (
    "JAX_",
    "XLA_",
    "TPU_",
    "LIBTPU_",
    "CUDA_VISIBLE",
    "CUDA_HOME",
    "LD_LIBRARY_PATH",
    "NVIDIA_VISIBLE",
    "OMP_",
    "HF_HOME",
    "HF_HUB_",
    "HUGGINGFACE_HUB_CACHE",
    "TRANSFORMERS_OFFLINE",
    "XDG_CACHE_HOME",
)
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY")
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")
DEVICES = """
import json, jax
print(json.dumps([f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]))
"""
DEVICE_SECONDS = 120.0


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser("collect-env", help="print versions, machine and settings, for a bug report")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-devices", action="store_true", help="do not start jax to ask for devices")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns the exit status."""
    report = environment(ask_devices=not args.no_devices)
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    for title, values in report.items():
        print(f"{title}:")
        for name, value in values.items():
            print(f"  {name:<22} {value}")
    return 0


def environment(ask_devices: bool = True) -> dict[str, dict[str, str]]:
    """The report by topics; every value is a text."""
    return {
        "jaxpaged": {"version": __version__, "folder": str(Path(__file__).parents[1]), "commit": commit()},
        "machine": {
            "python": f"{platform.python_version()} ({sys.executable})",
            "system": f"{platform.platform()}, {' '.join(platform.libc_ver()) or 'unknown C library'}",
            "processor": processor(),
            "cores": f"{usable_cores()} usable of {os.cpu_count()}",
            "memory": gibibytes(host_memory_bytes()),
            "gpus": "; ".join(f"{name}, {gibibytes(size)}" for name, size in gpus()) or "none that nvidia-smi shows",
        },
        "devices of jax": {"devices": devices() if ask_devices else "not asked for"},
        "packages": {name: version_of(name) for name in PACKAGES},
        "variables": variables(),
    }


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def variables() -> dict[str, str]:
    """Settings that change what jax and the hub do."""
    shown = {}
    for name, value in sorted(os.environ.items()):
        if name in SECRETS or (name.startswith(VARIABLES) and any(word in name for word in SECRET_WORDS)):
            shown[name] = "set (not shown)"
        elif name.startswith(VARIABLES):
            shown[name] = value
    return shown


def devices() -> str:
    """What jax finds, or why it finds nothing."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", DEVICES], capture_output=True, text=True, timeout=DEVICE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"jax did not find its devices within {DEVICE_SECONDS:.0f} s"
    try:
        return ", ".join(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"jax ended with status {done.returncode}: {last}"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit() -> str:
    """The commit of a checkout; a package that was installed has none."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return "none: installed as a package"
    return output_of("git", "-C", str(root), "describe", "--always", "--dirty").strip() or "unknown"
