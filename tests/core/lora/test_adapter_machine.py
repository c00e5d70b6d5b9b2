"""Adapters loaded, removed, loaded anew, pinned and changed on disk while requests come and go, in any order.

The runner of `simulation.py` computes with what a slot holds, and checks it at every step; every answer must be that of
the version that its request was bound to, and every block of the prefix cache what that version computes.
"""

import contextlib
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpaged.errors import RequestError, UsageError
from tests.core.simulation import Engine, adapter, prompt_of

IDS = range(1, 6)
PREFIXES = [prompt_of(n, seed) for n, seed in ((0, 0), (4, 0), (9, 0), (12, 1))]
MAX_MODEL_LEN = 32


class AdapterMachine(RuleBasedStateMachine):
    """An engine with few slots, fewer places in host memory than adapters, and files that change."""

    @initialize(
        max_loras=st.integers(1, 3),
        more_on_host=st.integers(0, 2),
        spare_blocks=st.integers(0, 8),
        depth=st.integers(1, 3),
        policy=st.sampled_from(["fcfs", "priority"]),
        drafts=st.sampled_from([0, 0, 4]),
        kept=st.sampled_from([0, 0, 1]),
    )
    def start(self, max_loras, more_on_host, spare_blocks, depth, policy, drafts, kept):
        self.engine = Engine(
            num_blocks=10 + spare_blocks,
            max_num_seqs=4,
            max_model_len=MAX_MODEL_LEN,
            depth=depth,
            most_drafts=drafts,
            scheduling_policy=policy,
            num_short_request_rows=kept,
            max_loras=max_loras,
            max_cpu_loras=max_loras + more_on_host,
        )
        self.engine.files.late = True
        self.current: dict = {}  # what new requests get, by id
        self.num_added = self.num_versions = 0

    @rule(lora_id=st.sampled_from(IDS), new=st.booleans())
    def load(self, lora_id, new):
        if new or lora_id not in self.current:
            self.num_versions += 1
            self.current[lora_id] = adapter(f"n{lora_id}", f"version {self.num_versions}", lora_id)
        self.engine.load(self.current[lora_id])

    @rule(lora_id=st.sampled_from(IDS))
    def remove(self, lora_id):
        assert self.engine.adapters.remove(lora_id) == (self.current.pop(lora_id, None) is not None)

    @rule(lora_id=st.sampled_from(IDS))
    def pin(self, lora_id):
        with contextlib.suppress(UsageError):  # all places are pinned
            assert self.engine.adapters.pin(lora_id) == (lora_id in self.current)

    @rule(lora_id=st.sampled_from(IDS), digest=st.sampled_from(["broken", None]))
    def change_files(self, lora_id, digest):
        """Others, or those that were loaded."""
        if lora_id in self.current:
            info = self.current[lora_id]
            self.engine.files.files[info.lora_path] = digest or info.digest

    @rule()
    def read(self):
        if self.engine.files.reading:
            self.engine.files.end_read()

    @rule(
        lora_id=st.sampled_from([None, *IDS, *IDS]),
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(1, 5), min_size=1, max_size=6),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
    )
    def add(self, lora_id, prefix, tail, max_tokens, priority):
        info = None if lora_id is None else self.current.get(lora_id, adapter(f"n{lora_id}", "?", lora_id))
        options = {"max_tokens": max_tokens, "priority": priority, "lora": info}
        request_id = f"r{self.num_added}"
        self.num_added += 1
        try:
            self.engine.add(request_id, prefix + tail, float(self.num_added), **options)
        except RequestError:
            assert lora_id is not None and lora_id not in self.current
        else:
            assert self.engine.requests[request_id].lora == self.current.get(lora_id)

    @rule(data=st.data())
    def abort(self, data):
        if alive := sorted(self.engine.scheduler.requests):
            self.engine.abort(data.draw(st.sampled_from(alive)))

    @precondition(lambda self: len(self.engine.in_flight) < self.engine.depth)
    @rule()
    def dispatch(self):
        self.engine.dispatch()

    @rule(n=st.integers(1, 8))
    def steps(self, n):
        for _ in range(n):
            self.engine.step()

    @rule()
    def sleep(self):
        self.engine.lose_everything()

    @rule(keeps=st.booleans())
    def change_weights(self, keeps):
        self.engine.change_weights(keeps=keeps)

    @invariant()
    def everything_is_accounted_for(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self):
        if hasattr(self, "engine"):
            finish(self.engine)
            for end in self.engine.ends.values():
                if end.finish_reason == "error":
                    assert "have changed since" in end.error or "all of them are pinned" in end.error


def finish(engine: Engine) -> None:
    """Run until all have ended, with what they wait for read at last."""
    engine.files.late = False
    while engine.files.reading:
        engine.files.end_read()
    engine.run()
    assert not engine.adapters.slots.wanting and not engine.adapters.slots.unread


AdapterMachine.TestCase.settings = settings(stateful_step_count=50, deadline=None)
TestAdapterMachine = pytest.mark.timeout(300)(AdapterMachine.TestCase)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_crowds_with_many_adapters_get_the_right_answers(policy):
    """Long runs with too few slots, places and blocks, so that all of them change hands often."""
    num_preemptions = num_loads = num_reads = num_hits = 0
    for seed in range(4):
        draw = random.Random(f"{seed} {policy}")
        engine = Engine(
            num_blocks=18, max_num_seqs=5, max_model_len=MAX_MODEL_LEN, depth=1 + seed % 3, scheduling_policy=policy,
            max_loras=1 + seed, max_cpu_loras=2 + seed, most_drafts=3 * (seed == 3),
        )  # fmt: skip
        infos = [adapter(f"n{i}", f"of {i}", i) for i in range(1, 9)]
        for info in infos:
            engine.load(info)
        for i in range(60):
            prompt = draw.choice(PREFIXES) + draw.choices(range(1, 6), k=draw.randint(1, 6))
            info = draw.choice([None, *infos, infos[0], infos[0]])
            options = {"max_tokens": draw.randint(1, 14), "priority": draw.randint(0, 2), "lora": info}
            engine.add(f"r{i}", prompt, float(i), **options)
            for _ in range(draw.choice([0, 0, 1, 3])):
                engine.step()
        engine.run()
        stats = engine.scheduler.make_stats()
        num_preemptions += stats.num_preemptions
        num_hits += stats.prefix_cache_hits
        num_loads += stats.lora.num_loads
        num_reads += engine.files.num_reads
    assert num_preemptions and num_hits and num_loads > 40 and num_reads > 20, "the test is too easy"
