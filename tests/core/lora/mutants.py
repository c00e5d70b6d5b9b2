"""Deliberate mistakes in which adapter is where, which quick tests must notice. `scripts/mutate.py` tries them."""

from tests.mutants import mutants_of

_of = mutants_of(lambda module: ("tests/core/lora", "tests/core/kv_cache/test_block_hash.py"))

MUTANTS = (
    # ---- slots
    *_of(
        "jaxpaged/core/lora/slots.py",
        "",
        ("a slot is given away while requests have it", "if adapter.slot and not adapter.is_open:", "if adapter.slot:"),
        ("a slot that runs again is still given away", "        self._idle.pop(adapter, None)", "        pass"),
        ("a slot keeps what it had", "            if not adapter.is_loaded:", "            if not self.num_loads:"),
        ("what was lost counts as loaded", "            adapter.is_loaded = False\n", "            pass\n"),
        (
            "the newest goes first",
            "self._give(self._empty.pop(), self.wanting.first)",
            "self._give(self._empty.pop(), [*self.wanting][-1])",
        ),
        (
            "the slot that was used last is given away",
            "self._evict(next(iter(self._idle)))",
            "self._evict(next(reversed(self._idle)))",
        ),
        ("nobody's slot is closed", "                self._close_slots(running)\n", "                pass\n"),
        ("a closed slot takes new requests", "or self._age(request) < adapter.closes_before", "or True"),
        (
            "a closed slot never opens again",
            "            victim.closed_for = victim.closes_before = None\n",
            "            return\n",
        ),
        (
            "parked requests are left behind",
            "                self._queues[request.rank].unpark(adapter, request)",
            "                break",
        ),
    ),
    # ---- versions and host memory
    *_of(
        "jaxpaged/core/lora/book.py",
        "",
        (
            "a version is an id",
            "    return info.lora_int_id, info.lora_name, info.lora_path, info.digest",
            "    return info.lora_int_id, info.lora_name, info.lora_path, ''",
        ),
        ("other files pass for those of before", "elif future.result().digest != adapter.info.digest:", "elif False:"),
        (
            "a removed adapter serves on",
            "if adapter is not None and not adapter.is_removed:",
            "if adapter is not None:",
        ),
        (
            "an adapter is dropped with its last old request",
            "if not (adapter.num_requests or adapter.is_current):",
            "if not adapter.num_requests:",
        ),
        ("old versions stay for ever", "            self._drop_unused(before)\n", "            pass\n"),
        (
            "pinned adapters leave",
            "kept = [each for each in self._residents if not each.is_pinned]",
            "kept = list(self._residents)",
        ),
        ("an old version leaves while requests have it", "if each.is_loaded and each.is_current", "if each.is_loaded"),
        ("what waits for a slot leaves host memory", "if each.is_loaded and each.is_current", "if each.is_current"),
    ),
    # ---- keys
    *_of(
        "jaxpaged/core/kv_cache/block_hash.py",
        "",
        ("blocks are those of a name", "lora.lora_path, lora.digest))", "lora.lora_path))"),
    ),
)
