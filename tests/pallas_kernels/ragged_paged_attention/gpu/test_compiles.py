"""The GPU kernels lower for A100, H100 and B200 anywhere, and go through ptxas where the extra `aot-gpu` is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import gpu_targets
from pallas_kernels.gpu_targets import TARGETS, lower_for
from pallas_kernels.ragged_paged_attention.cases import SERVING_SHAPES
from pallas_kernels.ragged_paged_attention.gpu import binding_refusal
from pallas_kernels.testing import layer_of

ROOT = Path(__file__).parents[4]
SHAPE = {shape.name: shape for shape in SERVING_SHAPES}
FIRST = "decodes and chunks"
QUICK = {
    "h100": [
        "a few decodes",
        FIRST,
        "decodes that share",
        "head_dim 256, window, soft cap",
        "head_dim 256, window, both ways",
        "head_dim 64, window, sinks",
        "float8 cache, scales of heads",
    ]
}
FEW = 8  # bytes: two registers
NUM_KERNELS = 5  # write; attend and merge for each class of tiles; for what rows share two more

needs_compiler = [
    pytest.mark.aot_gpu,
    pytest.mark.skipif(gpu_targets.why_not() is not None, reason=str(gpu_targets.why_not())),
]


def lowered():
    """(shape, target): the first shape for all, and all shapes for one; the rest is lowered where it is compiled."""
    for name in SHAPE:
        for target in TARGETS:
            marks = () if name == FIRST else pytest.mark.slow if target in QUICK else pytest.mark.exhaustive
            yield pytest.param(name, target, id=f"{name}-{target}", marks=marks)


@pytest.mark.parametrize(("name", "target"), list(lowered()))
def test_a_layer_lowers_to_triton(name, target):
    """All of it: Mosaic's kernel takes no steps as short as these."""
    layer, args = layer_of(SHAPE[name], "gpu")
    program = lower_for(TARGETS[target], layer, *args)
    few = 3 if SHAPE[name].num_tokens <= 32 else NUM_KERNELS
    assert program.count("__gpu$xla.gpu.triton") == few + 2 * SHAPE[name].shares


def compiled(target: str, names: list[str], backend: str) -> list[dict]:
    """What scripts/compile_for_gpu.py reports, in a process of its own: it must set up jax before it is imported."""
    script = [ROOT / "scripts" / "compile_for_gpu.py", "--json", "--target", target, "--backend", backend]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    lines = subprocess.run(
        [sys.executable, *script, "--shapes", *names], check=True, capture_output=True, text=True, env=environment
    ).stdout.splitlines()
    return [json.loads(line) for line in lines]


def check(reports: list[dict], names: list[str], target: str, backend: str = "gpu") -> None:
    assert {report["shape"] for report in reports} == set(names)
    for report in reports:
        print(report)
        assert report["spilled_bytes"] <= (FEW if target == "h100" and backend == "gpu" else 200), report
        assert report["warnings"] == [], report  # such as Hopper's products waiting for each other
        assert report["shared_memory"] <= TARGETS[target].shared_memory[0], report


NO_TRITON = binding_refusal(is_pallas=False, interpret=False)
NEEDS_TRITON = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
BACKENDS = ["gpu", pytest.param("gpu-triton", marks=NEEDS_TRITON)]


GPUS = [target for target in TARGETS if target != "h200"]
"""An H200 is an H100 with more memory, to a compiler."""
IN_EACH_RUN = [*((target, "gpu") for target in GPUS), pytest.param("h100", "gpu-triton", marks=NEEDS_TRITON)]
OTHERS = [
    pytest.param(target, "gpu-triton", marks=[NEEDS_TRITON, pytest.mark.exhaustive])
    for target in GPUS
    if target != "h100"
]


class TestWithCompiler:
    pytestmark = needs_compiler

    def test_layers_after_each_other_share_their_temporaries(self):
        """XLA would begin with all outputs at once, did not each take the place of its queries."""
        layer, (kv, *args) = layer_of(SHAPE[FIRST], "gpu")

        def temporaries(num_layers):
            def layers(caches, q_TNH, *others):
                after = []
                for cache in caches:
                    q_TNH, cache = layer(cache, q_TNH, *others)
                    after.append(cache)
                return q_TNH, after

            program = gpu_targets.compile_for(TARGETS["h100"], layers, [kv] * num_layers, *args, donate=(0,))
            return program.memory_analysis().temp_size_in_bytes

        q_TNH = args[0]
        assert temporaries(8) < temporaries(2) + 2 * q_TNH.size * q_TNH.dtype.itemsize

    @pytest.mark.parametrize(("target", "backend"), [*IN_EACH_RUN, *OTHERS])
    def test_kernels_compile_without_spills(self, target, backend):
        names = QUICK.get(target, [FIRST]) if backend == "gpu" else [FIRST]
        check(compiled(target, names, backend), names, target, backend)

    @pytest.mark.slow
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("target", GPUS)
    def test_every_shape_compiles_without_spills(self, target, backend):
        check(compiled(target, list(SHAPE), backend), list(SHAPE), target, backend)

    @NEEDS_TRITON
    @pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_kernels_in_triton_itself_are_right_in_its_interpreter(self, marked):
        # Triton decides when it is imported, so this takes a process of its own.
        environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
        tests = Path(__file__).with_name("test_triton_numerics.py")
        command = [sys.executable, "-m", "pytest", "-q", "-m", marked, tests]
        run = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert run.returncode == 0, run.stdout + run.stderr
        assert " passed" in run.stdout
        assert "skipped" not in run.stdout
