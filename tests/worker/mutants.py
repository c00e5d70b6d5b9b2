"""Deliberate mistakes in what is compiled when, which quick tests must notice. `scripts/mutate.py` tries them."""

from tests.mutants import mutants_of

_of = mutants_of(lambda module: ("tests/worker/programs/test_compile_queue.py",))

MUTANTS = tuple(
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
