"""The one list of named shapes for tests. Knows no arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """`num_things` of `num_groups` groups, of which chance chooses among the first `num_used`, or none."""

    name: str
    num_things: int
    num_groups: int
    num_used: int


CASES = (
    Case("a decode of 32 tokens with 8 of 64 experts", 256, 64, 64),
    Case("a prompt", 4096, 128, 128),
    Case("one thing", 1, 3, 3),
    Case("one group", 40, 1, 1),
    Case("groups without anything", 40, 64, 5),
)
