"""Deliberate mistakes in decoders, which quick tests must notice. `scripts/mutate.py` tries them."""

from tests.mutants import mutants_of

_of = mutants_of(lambda module: ("tests/params/formats",))
_FORMATS = "jaxpaged/params/formats"

MUTANTS = (
    *_of(
        f"{_FORMATS}/packing.py",
        "",
        ("nibbles change places", "pairs |= pairs << 4", "pairs[...] = pairs >> 4 | pairs << 8"),
        ("numbers are not signed", "return 1 << (bits - 1)", "return 0"),
        ("a tile lies beside its place", "out_OW[column : column + TILE_COLUMNS", "out_OW[0 : TILE_COLUMNS"),
    ),
    *_of(
        f"{_FORMATS}/gptq.py",
        "golden",
        ("the one that version 1 lacks is forgotten", "stored_CR if is_v2 else", "stored_CR if True else"),
        ("version 2 gets one too", "stored_CR if is_v2 else", "stored_CR if False else"),
        ("the order of inputs is forgotten", "zeros_RC, group, order)", "zeros_RC, group)"),
    ),
    *_of(
        f"{_FORMATS}/awq.py",
        "golden",
        ("outputs of a word are fields of it", "(0, 2, 4, 6, 1, 3, 5, 7)", "(0, 4, 1, 5, 2, 6, 3, 7)"),
        ("outputs of a word are in order", "(0, 2, 4, 6, 1, 3, 5, 7)", "(0, 1, 2, 3, 4, 5, 6, 7)"),
        ("zeros are forgotten", "zeros_RC if zeros_RC.any() else None", "None"),
    ),
    *_of(
        f"{_FORMATS}/float8.py",
        "golden",
        ("an inverse scale divides", "checked_scales(floats, name)[num", "1 / checked_scales(floats, name)[num"),
        ("blocks are as wide as high", "scales_RC, None, block[1])", "scales_RC, None, block[0])"),
    ),
    *_of(
        f"{_FORMATS}/stored_weight.py",
        "golden",
        ("exponents are off by one", "np.arange(NOT_A_NUMBER) - 127", "np.arange(NOT_A_NUMBER) - 128"),
        ("inputs stay in the order of groups", "np.argsort(self.order)", "self.order"),
    ),
    *_of(
        f"{_FORMATS}/float4.py",
        "golden",
        ("the global scale multiplies", "scales_RC / whole if is_divisor", "scales_RC * whole if is_divisor"),
        ("the second scale divides", "else scales_RC * whole", "else scales_RC / whole"),
        ("nibbles change places", "np.array([0, 4, 8, 12])", "np.array([4, 0, 12, 8])"),
        ("groups are halves", "MX_GROUP, NV_GROUP = 32, 16", "MX_GROUP, NV_GROUP = 16, 16"),
    ),
    *_of(
        f"{_FORMATS}/groups.py",
        "",
        ("neighbours need equal numbers only", "(np.diff(group_of_I) >= 0).all()", "True"),
        ("groups that do not exist are taken", "highest >= num_groups", "False"),
        ("unequal groups are taken", "sizes.min() != sizes.max()", "False"),
    ),
    *_of(
        f"{_FORMATS}/gguf/blocks.py",
        "gguf",
        (
            "halves change places",
            "out[..., 0, :] = (packed & np.uint8(15))",
            "out[..., 0, :] = (packed >> np.uint8(4))",
        ),
        ("scales of 6 bits lose their upper ones", "third & 15 | first >> 2 & 48", "third & 15"),
        ("minima are those of the first inputs", "third >> 4 | second >> 2 & 48", "third >> 4 | first >> 2 & 48"),
        ("a group that is its minimum is zero", "flat.any()", "False"),
        ("minima are added", "half_floats(blocks, 2) * minima, ", "-half_floats(blocks, 2) * minima, "),
        ("scales of IQ4_XS are not signed", "high << 4) - 32)", "high << 4) - 0)"),
    ),
    *_of(
        f"{_FORMATS}/gguf/reader.py",
        "gguf",
        ("parts are read in any order", "!= (i, count)", "== ()"),
        ("tensors may overlap", "before.num_bytes > after.begin", "before.num_bytes < 0"),
        ("the fastest axis comes first", "for _ in range(num_dims))[::-1]", "for _ in range(num_dims))"),
    ),
)
