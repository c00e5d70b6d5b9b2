"""Deliberate mistakes in what is compiled when, which quick tests must notice. `scripts/mutate.py` tries them."""

from tests.mutants import mutants_of

_of = mutants_of(lambda module: ("tests/worker/programs/test_compile_queue.py",))

_of_blocks = mutants_of(lambda module: ("tests/worker/test_block_copies.py",))

_of_adapters = mutants_of(lambda module: ("tests/worker/test_adapters.py", "tests/layers/test_lora.py"))
ROWS, BACK = "each_row and one", "comes_back and one"

_of_tables = mutants_of(
    lambda module: (
        "tests/end_to_end/test_adapters_of_tables.py",
        "tests/end_to_end/test_adapters_of_classifiers.py",
    )
)

OF_ADAPTERS = (
    *_of_tables(
        "jaxpaged/layers/lora.py",
        "peft and tokens",
        ("rows are those of the first slot", "part.b.at[slots.place_T, ids_T]", "part.b.at[0 * slots.place_T, ids_T]"),
    ),
    *_of_tables(
        "jaxpaged/worker/step/adapters.py",
        "peft",
        ("scores are those of the next slot", "jnp.maximum(pooled.slots - 1, 0)", "pooled.slots"),
        (
            "every slot has a classifier of its own",
            "-1, *[1] * (stack.values.ndim - 1)) > 0",
            "-1, *[1] * (stack.values.ndim - 1)) >= 0",
        ),
    ),
    *_of_adapters(
        "jaxpaged/layers/lora.py",
        ROWS,
        ("slots are counted from 0", "jnp.arange(1, num_slots + 1)", "jnp.arange(num_slots)"),
        ("all slots act on every token", "(u_TSr * own_TS[:, :, None])", "u_TSr"),
        ("growth is not added to 1", "base_TO * (1 + more_TO)", "base_TO * more_TO"),
    ),
    *_of_adapters(
        "jaxpaged/layers/experts.py",
        "experts",
        ("experts grow by the first slot", "jnp.argmax(own_CS, axis=1)]", "jnp.argmax(own_CS, axis=1) * 0]"),
    ),
    *_of_adapters(
        "jaxpaged/worker/lora_stacks.py",
        ROWS,
        ("magnitudes scale twice", "own_b = own_b * own.magnitude\n", "own_b = own_b * own.magnitude**2\n"),
        ("growth is the magnitude", "own.magnitude[None] - np.float32(1)", "own.magnitude[None]"),
        ("every part has the first ranks", "own_a = own.a[ranks.start : ranks.stop]", "own_a = own.a[: len(ranks)]"),
    ),
    *_of_adapters(
        "jaxpaged/worker/step/adapters.py",
        ROWS,
        ("an adapter goes into the next slot", "part, slot - 1, piece.axis", "part, slot, piece.axis"),
    ),
    *_of_adapters(
        "jaxpaged/worker/adapter_slots.py",
        BACK,
        (
            "a slot keeps its first adapter",
            "adapter = self._host[lora_int_id]",
            "adapter = self._in_slots.get(slot, self._host[lora_int_id])",
        ),
        ("steps take the parts of their smallest adapter", ".max(initial=0)", ".min(initial=9)"),
        ("slots have no level", "adapter, adapter.level\n", "adapter, 0\n"),
    ),
    *_of_adapters(
        "jaxpaged/worker/adapter_slots.py",
        "changes_nothing",
        ("it is probed until it passes", "self._probed.add(version_of(info))", "pass"),
    ),
    *_of_adapters(
        "jaxpaged/worker/request_rows.py",
        ROWS,
        ("a row keeps the slot before", "self.lora_slots_R[row] = request.lora_slot", "pass"),
    ),
)

OF_BLOCKS = tuple(
    _of_blocks(
        "jaxpaged/worker/cache/block_copies.py",
        "elsewhere",
        ("negative ids count from the end", "(id_P >= 0) & ", ""),
        ("padding gathers something", "fill_value=0", "fill_value=1"),
    )
)

MUTANTS = (
    OF_ADAPTERS
    + OF_BLOCKS
    + tuple(
        _of(
            "jaxpaged/worker/programs/compile_queue.py",
            "",
            ("small steps tell what a token takes", "if bucket > self._bucket:", "if bucket != self._bucket:"),
            ("a pause is a part of the next step", "self._chain_since = self.now()", "pass"),
            ("a step lasts from its dispatch on", "max(self._chain_since, self._quiet_since)", "self._chain_since"),
            (
                "steps that a better program takes now still ask for others",
                "next((prepared for prepared in sizes if prepared >= size), key.size)",
                "sizes[-1]",
            ),
            ("programs of other kinds are missed too", "kind == key.kind and size <= key.size", "size <= key.size"),
            ("only steps of its own size miss a program", "size <= key.size:", "size == key.size:"),
            ("larger steps miss it too", "kind == key.kind and size <= key.size", "kind == key.kind"),
            ("what is loaded costs as much", "self._load_seconds if key in self._loaded else compiling", "compiling"),
            ("all of the cost must be lost", "MISSED_SHARE * cost", "cost"),
            ("a row that samples is a token", "saved += row_share * num_steps", "saved += num_steps"),
            (
                "all kinds cost as much",
                "self._compile_seconds.get(key.kind, COMPILE_SECONDS)\n        cost",
                "COMPILE_SECONDS\n        cost",
            ),
            ("seconds are tokens", "seconds / self._activity.token_seconds", "seconds"),
        )
    )
)
