"""Deliberate mistakes in how quantised weights are found, recoded and placed, and in how adapters are read and merged,
which quick tests must notice. `scripts/mutate.py` tries them."""

from tests.mutants import mutants_of

_of = mutants_of(
    lambda module: ("tests/params/schemes", "tests/models/test_stored_weights.py", "tests/models/test_stored_faults.py")
)
_of_adapters = mutants_of(lambda module: ("tests/params/adapters",))
_PARAMS = "jaxpaged/params"
_SCALED = "matched(self.alpha_patterns, module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilised else rank)"

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
    *_of_adapters(
        f"{_PARAMS}/adapters/description.py",
        "peft or refused",
        ("the scaling is inverted", _SCALED, f"1 / ({_SCALED})"),
        ("rsLoRA is forgotten", "(math.sqrt(rank) if self.is_rank_stabilised else rank)", "rank"),
        ("unknown fields pass", "name not in fields.read and name not in RECORDS", "False"),
    ),
    *_of_adapters(
        f"{_PARAMS}/adapters/matrices.py",
        "peft or experts",
        (
            "experts are slowest in B",
            ".reshape(b.shape[0], -1, num_experts).transpose(2, 0, 1)",
            ".reshape(b.shape[0], num_experts, -1).transpose(1, 0, 2)",
        ),
        ("the scaling counts twice", "as_float32(b_XP) * np.float32(scaling)", "as_float32(b_XP) * scaling**2"),
        ("the table has no scaling", "as_float32(a_PV.T) * np.float32(scaling)", "as_float32(a_PV.T)"),
        ("up is gate", "own * list(place.targets).index(target)", "0"),
        ("old layouts are new ones", "(outputs != inputs or not is_old or is_transposed)", "True"),
    ),
    *_of_adapters(
        f"{_PARAMS}/adapters/norms.py",
        "peft",
        ("norms are the base's", "base + product(weights, target)", "base"),
    ),
    *_of_adapters(
        f"{_PARAMS}/adapters/reading.py",
        "refused",
        ("what does nothing passes", "if not replaced and not any(", "if False and not any("),
        ("ranks may differ", "if rank != wanted:", "if False:"),
        (
            "changed tables pass",
            "not np.array_equal(tensor.astype(np.float32), self._base_weight(target.spec))",
            "False",
        ),
    ),
    *_of_adapters(
        f"{_PARAMS}/adapters/merging.py",
        "peft",
        ("magnitudes are left out", "if magnitude is not None:", "if False:"),
        (
            "heads stay tied",
            "write_file, untied if unties else",
            "write_file, lambda hf: hf if True else",
        ),
    ),
)
