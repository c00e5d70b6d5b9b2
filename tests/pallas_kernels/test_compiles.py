"""Every op's kernels go through the real compilers at serving sizes: for TPUs and GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import gpu_targets, tpu_targets
from pallas_kernels.programs import OPS, programs, tuned_products

ROOT = Path(__file__).parents[2]
NO_TPU, NO_GPU = str(tpu_targets.why_not()), str(gpu_targets.why_not())
HARMLESS_SPILL = 40  # bytes of a thread: some numbers that live through a loop


def cases(backend: str):
    """(op, name, program) of all; the first of each op is part of the quick suite."""
    for op in OPS:
        for i, (name, program) in enumerate(programs(op, backend)):
            yield pytest.param(op, name, program, id=f"{op}: {name}", marks=pytest.mark.slow if i else ())


def lacks_type(target: str, name: str) -> bool:
    return target == "a100" and "float8" in name and "array" not in name  # bytes are moved whatever they are


GPUS = [target for target in gpu_targets.TARGETS if target != "h200"]
"""An H200 is an H100 with more memory, to a compiler."""
OTHERS = pytest.mark.exhaustive  # attention is compiled for them in each run


@pytest.mark.aot_tpu
@pytest.mark.skipif(tpu_targets.why_not() is not None, reason=NO_TPU)
@pytest.mark.parametrize("target", tpu_targets.TARGETS.values(), ids=tpu_targets.TARGETS)
@pytest.mark.parametrize(("op", "name", "program"), list(cases("tpu")))
def test_a_kernel_compiles_for_a_tpu_and_fits_its_vmem(op, name, program, target):
    compiled = tpu_targets.compile_for(target, program.function, *program.args, donate=program.donate)
    vmem = tpu_targets.vmem_of_kernels(compiled)
    print(op, name, target.name, vmem)
    assert set(vmem) == {op}
    assert vmem[op] < target.info.vmem_capacity_bytes


def lowered():
    """The first program of each op: all are compiled below, where CUDA's compilers are."""
    for case in cases("gpu"):
        yield pytest.param(*case.values, id=case.id, marks=pytest.mark.exhaustive if case.marks else ())


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize(("op", "name", "program"), list(lowered()))
def test_a_kernel_lowers_to_triton(op, name, program, target):
    if lacks_type(target, name):
        pytest.skip(f"{target} has no float8")
    assert "__gpu$xla.gpu.triton" in gpu_targets.lower_for(gpu_targets.TARGETS[target], program.function, *program.args)


@pytest.mark.aot_gpu
@pytest.mark.skipif(gpu_targets.why_not() is not None, reason=NO_GPU)
@pytest.mark.parametrize("target", [pytest.param(each, marks=() if each == "h100" else OTHERS) for each in GPUS])
@pytest.mark.parametrize("op", [*(op for op in OPS if any(programs(op, "gpu"))), "few_rows_matmul"])
def test_kernels_compile_for_a_gpu_without_spills_to_speak_of(op, target):
    # In a process of its own: the script must set up jax before it is imported.
    compiled = programs(op, "gpu") if op in OPS else tuned_products()
    names = [name for name, _ in compiled if not lacks_type(target, name)]
    command = [sys.executable, ROOT / "scripts" / "compile_for_gpu.py", "--json", "--target", target]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    printed = subprocess.run(
        [*command, "--op", op, "--shapes", *names], check=True, capture_output=True, text=True, env=environment
    ).stdout
    reports = [json.loads(line) for line in printed.splitlines()]
    assert {report["shape"] for report in reports} == set(names)
    for report in reports:
        print(report)
        assert report["spilled_bytes"] <= HARMLESS_SPILL, report
        assert report["warnings"] == [], report
        assert report["shared_memory"] <= gpu_targets.TARGETS[target].shared_memory[0], report
