"""What goes to the device, besides the steps, when a request gets a row: its sampling state, if it needs any.

Most requests need none: their parameters travel with every step, in `SamplingRows`. Those that need the full
sampling program write their row once, and again after a preemption.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxpaged.messages import NewRequestData
from jaxpaged.sampling.custom import CustomProcessors
from jaxpaged.sampling.rows import SamplingRows
from jaxpaged.sampling.state import StateLayout, pack_row, pack_tokens, pack_trace
from jaxpaged.sampling_params.features import Feature, features_of
from jaxpaged.worker.programs.declare import ProgramKind

ELSEWHERE = Feature.PENALTIES | Feature.LOGPROBS | Feature.TRACE
"""Features that `load_row` brings nothing for."""


class Upload(NamedTuple):
    """One call of a loading program: which one, and its int32 array."""

    program: ProgramKind
    packed: np.ndarray


def admit(
    row: int, request: NewRequestData, rows: SamplingRows, layout: StateLayout, custom: CustomProcessors
) -> Iterator[Upload]:
    """Fill the row's line of `rows`, and yield the uploads that its first step must come after.

    Raises RequestError when a custom logits processor refuses the request; its line is then that of a plain one.
    """
    params = request.sampling_params
    rows.set(row, params)
    bits, numbers = custom.of(params)
    features = features_of(params)
    rows.set(row, params, bits)
    if bits or features & ~ELSEWHERE:
        output_token_ids = request.token_ids[request.num_prompt_tokens :]
        packed = pack_row(layout, row, params, output_token_ids=output_token_ids, custom_params=numbers)
        yield Upload(ProgramKind.LOAD_ROW, packed)
    if features & Feature.PENALTIES:
        for packed in pack_tokens(row, request.token_ids, request.num_prompt_tokens):
            yield Upload(ProgramKind.LOAD_TOKENS, packed)
    if features & Feature.TRACE:
        for packed in pack_trace(row, params.trace_decode_token_ids or ()):
            yield Upload(ProgramKind.LOAD_TRACE, packed)
