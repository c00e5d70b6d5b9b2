"""The one list of named shapes for tests. Knows no arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """`num_rows` of type `dtype` times a weight of `num_inputs` and `num_outputs`."""

    name: str
    num_rows: int
    num_inputs: int
    num_outputs: int
    dtype: str = "bfloat16"


CASES = (
    Case("one row", 1, 256, 130),
    Case("two rows, one register of inputs", 2, 64, 64),
    Case("three rows, odd sizes", 3, 192, 67),
    Case("eight rows", 8, 128, 33),
    Case("nine rows, one beyond a tile", 9, 320, 35),
    Case("thirty-two rows", 32, 192, 70),
    Case("four groups at once, odd sizes", 13, 384, 67),
    Case("more rows than the kernels take of float32", 33, 192, 70),
    Case("one output", 2, 64, 1),
    Case("float32, one row", 1, 192, 67, "float32"),
    Case("float32, seventeen rows", 17, 128, 34, "float32"),
    Case("float32, more rows than the kernels take", 40, 128, 34, "float32"),
)
