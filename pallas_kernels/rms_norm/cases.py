"""The one list of named shapes for tests. Knows no arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """`num_rows` of `num_columns`."""

    name: str
    num_rows: int
    num_columns: int


CASES = (
    Case("one row", 1, 768),
    Case("heads", 96, 128),
    Case("a prompt", 70, 1024),
    Case("a register and no more", 3, 16),
    Case("an odd number of registers", 5, 16 * 7),
    Case("rows longer than a chunk", 2, 70_000),
)
