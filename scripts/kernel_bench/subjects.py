"""What `bench_kernel.py` times: every op's cases as one kind of thing. Knows no clock."""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from kernel_bench.yardsticks import Yardsticks

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.programs import OPS
from pallas_kernels.ragged_paged_attention.cases import SERVING_STEPS, TINY_STEPS
from pallas_kernels.serving import attention_chain
from pallas_kernels.timing import Chain
from pallas_kernels.workloads import chain_of, choose_backend

ATTENTION = "ragged_paged_attention"
NAMES = (*OPS, ATTENTION)  # attention's yardsticks take longest, so others go first


@dataclasses.dataclass(frozen=True)
class Subject:
    """One case: the bytes and operations that it cannot avoid, and how to come by what is timed.

    `choose(name)` is the backend that it means here; `chain(backend)` its calls; `yardsticks()` what a user would
    call instead.
    """

    op: str
    name: str
    num_bytes: int
    flops: int
    choose: Callable[[str], str]
    chain: Callable[[str], Chain]
    yardsticks: Callable[[], Yardsticks]


def subjects(ops: list[str], sizes: str, platform: str) -> Iterator[Subject]:
    """The cases of these ops; `sizes` is "serving" or "tiny"."""
    for op in ops:
        if op == ATTENTION:
            yield from (_of_attention(step, platform) for step in (TINY_STEPS if sizes == "tiny" else SERVING_STEPS))
        else:
            cases = OPS[op].cases
            yield from (
                _of_op(op, case, platform) for case in (cases.TINY_CASES if sizes == "tiny" else cases.SERVING_CASES)
            )


def _of_attention(step: Any, platform: str) -> Subject:
    return Subject(
        ATTENTION,
        step.name,
        step.step_bytes,
        step.flops,
        choose=lambda name: rpa.choose_backend(name, platform),
        chain=lambda backend: attention_chain(step, backend),
        yardsticks=lambda: _yardsticks_of(ATTENTION)(step, platform),
    )


def _of_op(op: str, case: Any, platform: str) -> Subject:
    return Subject(
        op,
        case.name,
        case.num_bytes,
        case.flops,
        choose=lambda name: choose_backend(op, case, name, platform),
        chain=lambda backend: chain_of(op, case, backend),
        yardsticks=lambda: _yardsticks_of(op)(case, platform),
    )


def _yardsticks_of(op: str) -> Callable[[Any, str], Yardsticks]:
    return importlib.import_module(f"kernel_bench.{op}").yardsticks
