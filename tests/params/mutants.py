"""Deliberate mistakes in how quantised weights are found, recoded and placed, which quick tests must notice.
`scripts/mutate.py` tries them."""

from tests.mutants import mutants_of

_of = mutants_of(
    lambda module: ("tests/params/schemes", "tests/models/test_stored_weights.py", "tests/models/test_stored_faults.py")
)
_PARAMS = "jaxpaged/params"

MUTANTS = (
    *_of(
        f"{_PARAMS}/schemes/scheme.py",
        "lists or compressed or files",
        (
            "names of parts count as names",
            'f".{module}.".startswith(f".{entry}.")',
            'f".{module}.".startswith(f".{entry}")',
        ),
        ("heads are no linear modules", "(entry == LINEAR and kind == HEAD)", "False"),
        ("what files say is forgotten", "if module in self.plain:", "if False:"),
    ),
    *_of(
        f"{_PARAMS}/schemes/gptq.py",
        "rules",
        ("rules that leave modules change them", 'if pattern.startswith("-:"):', "if False:"),
        ("the head goes by the others", "rules.insert(0, Rule(EXACT, LM_HEAD, None))", "pass"),
    ),
    *_of(
        f"{_PARAMS}/schemes/floats4.py",
        "every_format",
        ("ModelOpt's global scale divides", "is_divisor=self.is_divisor, rows", "is_divisor=True, rows"),
    ),
    *_of(
        f"{_PARAMS}/recoding.py",
        "every_format",
        ("zeros are left out of rows", "values.astype(np.int16) - zeros.astype(np.int16)", "values.astype(np.int16)"),
    ),
    *_of(
        f"{_PARAMS}/placing.py",
        "every_format or logits",
        ("groups and outputs change places", "of_group_MOC.swapaxes(1, 2)", "of_group_MOC"),
    ),
    *_of(
        f"{_PARAMS}/forms.py",
        "every_format or logits",
        ("shards cut groups", "num_inputs // group % shards", "num_inputs % shards"),
        ("experts have zeros", "(has_zeros or has_order)", "has_order"),
    ),
    *_of(
        f"{_PARAMS}/encoded.py",
        "every_format or damage",
        ("values may be no numbers", ">= first_wrong", "> first_wrong"),
        ("up is gate", 'UNSTACKED[found["projection"]][spec.part]', 'UNSTACKED[found["projection"]][0]'),
    ),
    *_of(
        f"{_PARAMS}/expected.py",
        "damage or agree",
        ("optional tensors must be there", "if not (each.is_optional or any(", "if not (any("),
        ("other shapes pass", "if entry.shape not in expected.shapes:", "if False:"),
    ),
)
