"""What outputs say to trainers besides tokens and log probabilities, as JSON has it."""

import base64
import io
from typing import Any

import numpy as np

from jaxpaged.messages import CompletionOutput


def for_trainers(completion: CompletionOutput) -> dict[str, Any]:
    """What limits left to each token, and the experts that tokens went to as the base64 of an .npy file, as vLLM has
    them; fields of a choice that only engines have which were started for them."""
    fields: dict[str, Any] = {}
    if completion.sampling_mask is not None:
        fields["sampling_mask"] = completion.sampling_mask.token_ids
    if completion.routed_experts is not None:
        fields["routed_experts"] = base64.b64encode(npy_of(completion.routed_experts)).decode()
    return fields


def npy_of(array: np.ndarray) -> bytes:
    """The bytes of an .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def array_of(npy: bytes) -> np.ndarray:
    """The other way round. Raises ValueError for other bytes."""
    return np.load(io.BytesIO(npy), allow_pickle=False)
