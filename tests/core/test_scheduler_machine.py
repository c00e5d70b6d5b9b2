"""Random arrivals, aborts, steps and outputs in any order: everything is accounted for, every answer is right."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpaged.errors import RequestError
from tests.core.simulation import Engine, prompt_of

# Beginnings that prompts share, of whole blocks and not, with and without a common beginning of their own.
PREFIXES = [prompt_of(n, seed) for n, seed in ((0, 0), (4, 0), (9, 0), (16, 0), (12, 1), (7, 2))]
MAX_MODEL_LEN = 40


class SchedulerMachine(RuleBasedStateMachine):
    """The engine under random demand."""

    @initialize(
        windows=st.sampled_from([(None,), (5,), (None, 6), (None, 1), (9, 4), (None, 3, 8)]),
        spare_blocks=st.integers(0, 12),
        budget=st.integers(4, 24),
        depth=st.integers(1, 3),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 0, 5]),
        prefix_caching=st.sampled_from([True, True, False]),
    )
    def start(self, windows, spare_blocks, budget, depth, policy, threshold, prefix_caching):
        blocks_of_longest = MAX_MODEL_LEN // 4 * len(windows)
        self.engine = Engine(
            num_blocks=1 + blocks_of_longest // 2 + spare_blocks,
            windows=windows,
            max_num_batched_tokens=budget,
            max_num_seqs=4,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=prefix_caching,
            depth=depth,
            scheduling_policy=policy,
            long_prefill_token_threshold=threshold,
        )
        self.num_added = 0

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(3, 5), min_size=1, max_size=6),
        max_tokens=st.integers(1, 14),
        priority=st.integers(0, 2),
        ignore_eos=st.booleans(),
        salt=st.sampled_from([None, None, "salt"]),
        again=st.booleans(),
    )
    def add(self, prefix, tail, max_tokens, priority, ignore_eos, salt, again):
        ended = [r for r in self.engine.ends]
        if again and ended:
            self.engine.check_answers()
            request_id = ended[0]  # an id may be used again, even while old results are in flight
        else:
            request_id = f"r{self.num_added}"
        self.num_added += 1
        options = dict(max_tokens=max_tokens, priority=priority, ignore_eos=ignore_eos, cache_salt=salt)
        try:
            self.engine.add(request_id, prefix + tail, float(self.num_added), **options)
        except RequestError as error:
            assert "KV blocks" in str(error), error

    @rule(data=st.data())
    def abort(self, data):
        alive = sorted(self.engine.scheduler.requests)
        if alive:
            self.engine.abort(data.draw(st.sampled_from(alive)), "unknown")

    @precondition(lambda self: len(self.engine.in_flight) < self.engine.depth)
    @rule()
    def dispatch(self):
        self.engine.dispatch()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def receive(self):
        self.engine.receive()

    @rule()
    def step(self):
        self.engine.step()

    @rule()
    def reset_prefix_cache(self):
        held = any(any(request.blocks) for request in self.engine.scheduler.running)
        assert self.engine.scheduler.reset_prefix_cache() != held

    @invariant()
    def everything_is_accounted_for(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.run()


SchedulerMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestSchedulerMachine = pytest.mark.timeout(300)(SchedulerMachine.TestCase)
