"""Set-up that must come before jax is imported, and how hard hypothesis tries.

Tests run on the CPU with 8 virtual devices, so that sharding is tested everywhere. Compiled programs are kept
between runs in `.cache/`: compiling is most of the suite's time. LLVM optimises none, and takes 0.6 of the time for it.
What promises bits is run as users have it, by `.ci/run`: where XLA_FLAGS is set, if only to nothing, no level is.
"""

import functools
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CACHE = Path(__file__).parent.parent / ".cache"
COMPILING = frozenset(("end_to_end", "layers", "models", "pallas_kernels", "params", "sampling", "worker"))
DEVICES, UNOPTIMISED = "--xla_force_host_platform_device_count", "--xla_backend_optimization_level=0"

# Until the first test runs nothing is garbage: looking for it took half of the time of collecting them.
gc.disable()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = os.environ.setdefault("XLA_FLAGS", UNOPTIMISED)
if DEVICES not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} {DEVICES}=8".strip()
# Processes that tests start find the bytecode of our modules, which takes 0.6 s of a core each time it is made.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["XDG_CACHE_HOME"] = str(CACHE)  # an engine's own default lies below it
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "jaxpaged" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for the network is wrong
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
from jax._src import compiler  # noqa: E402

hypothesis.settings.register_profile("same", max_examples=50, deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", max_examples=100, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
hypothesis.configuration.set_hypothesis_home_dir(CACHE / "hypothesis")


def stood_back(compile_one: Callable[..., Any]) -> Callable[..., Any]:
    """`compile_one`, called by a thread that lets XLA's own threads go first, which the first call makes.

    The caller writes kernels that those threads compile. Each kernel that waits for them has a context of MLIR of its
    own, which takes longer to make than the kernel: a fifth of the CPU seconds of compiling a small model.
    """
    made: list[bool] = []

    @functools.wraps(compile_one)
    def compile_behind(*given: Any, **options: Any) -> Any:
        if not made:
            compiled = compile_one(*given, **options)
            made.append(True)
            return compiled
        with ThreadPoolExecutor(1, "compile", os.nice, (5,)) as thread:
            return thread.submit(compile_one, *given, **options).result()

    return compile_behind


if sys.platform == "linux":  # where a thread has a priority of its own
    compiler.backend_compile_and_load = stood_back(compiler.backend_compile_and_load)


def in_turn(paths: list[Path]) -> list[Path]:
    """Files that compile programs, which is more than one core's work, among those that mostly wait for processes."""
    kinds: tuple[list[Path], list[Path]] = ([], [])
    for path in paths:
        kinds[not COMPILING.isdisjoint(path.parts)].append(path)
    places = {path: (i + 0.5) / len(kind) for kind in kinds for i, path in enumerate(kind)}
    return sorted(paths, key=places.__getitem__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The name of a test is the same in every process, or workers that run tests side by side find different ones.

    Files with slow tests come first: a worker that begins with one of them when the other has nothing left works alone.
    """
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(f"an address in the name of a test: give its parameters ids. {unstable[0]}")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    paths = list(dict.fromkeys(item.path for item in items))
    first, last = ([path for path in paths if (path in slow) == is_slow] for is_slow in (True, False))
    places = {path: i for i, path in enumerate([*in_turn(first), *in_turn(last)])}
    items.sort(key=lambda item: places[item.path])


@pytest.fixture(scope="module", autouse=True)
def nothing_imported_is_looked_at() -> None:
    """The garbage collector leaves alone what was imported: looking through it took a third of the time of some files.

    The first module freezes what its process has imported, and every later one what came since.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty folder for sockets, whose paths have 107 bytes at most, however long those of `tmp_path` are."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What a test sets up for logging, as every command does, ends with it."""
    root, ours = logging.getLogger(), logging.getLogger("jaxpaged")
    before = root.handlers[:], ours.level
    yield
    root.handlers[:], level = before
    ours.setLevel(level)
