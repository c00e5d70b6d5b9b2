"""The one list of named shapes for tests. Knows no arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """`num_rows` times a weight of `num_inputs` and `num_outputs`, both of type `dtype`."""

    name: str
    num_rows: int
    num_inputs: int
    num_outputs: int
    dtype: str = "bfloat16"


CASES = (
    Case("one row", 1, 256, 130),
    Case("two rows", 2, 192, 64),
    Case("eight rows, odd sizes", 8, 133, 67),
    Case("three rows, fewer inputs than a register has", 3, 7, 33),
    Case("one output", 2, 64, 1),
    Case("int8, planes of one row", 2, 256, 130, "int8"),
    Case("int8, planes of eight rows, odd sizes", 16, 197, 67, "int8"),
    Case("int8, fewer inputs than a register has", 4, 13, 33, "int8"),
)
