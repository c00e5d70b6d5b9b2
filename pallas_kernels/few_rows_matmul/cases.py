"""The one list of named shapes for tests. Knows no arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """`num_rows` times a weight of `num_inputs` and `num_outputs`, both of type `dtype`; to int16 belong weights of
    int8."""

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
    Case("nine rows, a tile and a rest", 9, 133, 35),
    Case("sixty-four rows", 64, 72, 34),
    Case("a block of fifteen rows, fewer inputs than a word has", 15, 1, 3),
    Case("two blocks, odd sizes", 31, 133, 67),
    Case("five blocks, the last one of a single row", 65, 39, 70),
    Case("four hundred rows and outputs", 400, 65, 400),
    Case("int8, planes of one row", 2, 256, 130, "int8"),
    Case("int8, planes of eight rows, odd sizes", 16, 197, 67, "int8"),
    Case("int8, planes of 64 rows", 128, 69, 66, "int8"),
    Case("int8, planes of 72 rows, odd sizes", 144, 199, 67, "int8"),
    Case("int8, two blocks of rows, fewer inputs than a word has", 31, 3, 5, "int8"),
    Case("int8, fewer inputs than a register has", 4, 13, 33, "int8"),
    Case("int16, one row", 1, 256, 130, "int16"),
    Case("int16, seven rows, odd sizes", 7, 197, 67, "int16"),
    Case("int16, two tiles of rows and a rest", 19, 133, 35, "int16"),
    Case("int16, whole tiles of rows, more inputs than 16 bits allow", 16, 5000, 33, "int16"),
    Case("int16, fewer inputs than a register has", 9, 5, 33, "int16"),
)
