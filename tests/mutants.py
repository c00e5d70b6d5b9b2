"""What a deliberate mistake is, which tests must notice. `scripts/mutate.py` tries those of the lists."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`original`, which occurs once in `module` (a path from the repository's root), is replaced by `wrong`.

    `noticed_by` selects the tests that should notice, as pytest's -k does; all of `tests`, files or folders, have a
    say.
    """

    what: str
    module: str
    original: str
    wrong: str
    tests: tuple[str, ...]
    noticed_by: str = ""


def mutants_of(tests_of: Callable[[str], tuple[str, ...]]) -> Callable[..., list[Mutant]]:
    """A function that makes mutants of a module, whose tests are `tests_of` it, from (what, original, wrong)."""

    def of(module: str, noticed_by: str, *mistakes: tuple[str, str, str]) -> list[Mutant]:
        return [
            Mutant(what, module, original, wrong, tests_of(module), noticed_by) for what, original, wrong in mistakes
        ]

    return of
