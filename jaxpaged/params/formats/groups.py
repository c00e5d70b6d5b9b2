"""Which group every input belongs to, where a file says so input by input: GPTQ's and compressed-tensors' `g_idx`.

Letters: I inputs.
"""

import numpy as np


def order_of_groups(group_of_I: np.ndarray, num_groups: int, name: str) -> np.ndarray | None:
    """Inputs [I] in the order of their groups, and in their own inside of one; None where they have it already.

    ValueError where a group does not exist or has another size than others.
    """
    lowest, highest = int(group_of_I.min()), int(group_of_I.max())
    if lowest < 0 or highest >= num_groups:
        raise ValueError(f"{name} names groups {lowest} to {highest}, but there are {num_groups}")
    sizes = np.bincount(group_of_I, minlength=num_groups)
    if sizes.min() != sizes.max():
        smallest, largest = int(sizes.argmin()), int(sizes.argmax())
        raise ValueError(
            f"{name} gives group {smallest} {sizes[smallest]} inputs and group {largest} {sizes[largest]}; groups of "
            "unequal sizes are not read"
        )
    if (np.diff(group_of_I) >= 0).all():
        return None
    return np.argsort(group_of_I, kind="stable")


def in_order(values: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """Columns of [rows, I] in the order of groups."""
    return values if order is None else np.take(values, order, axis=1, mode="clip")
