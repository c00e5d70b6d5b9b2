"""Random arrivals, aborts, steps and outputs in any order: everything is accounted for, every answer is right."""

import random
import re

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpaged.errors import RequestError
from jaxpaged.kv_cache_spec import AttentionSpec, EncoderCacheConfig
from tests.core.simulation import EOS, STOP, Engine, illustrated, latents, needs_of, prompt_of, states

# Beginnings that prompts share, of whole blocks and not, with and without a common beginning of their own.
PREFIXES = [prompt_of(n, seed) for n, seed in ((0, 0), (4, 0), (9, 0), (16, 0), (12, 1), (7, 2))]
PREFIXES += [[*prompt_of(7), STOP], [*prompt_of(9), EOS, STOP, 3]]
WINDOWS = [(None,), (5,), (None, 6), (None, 1), (9, 4), (None, 3, 8)]
# Blocks of several sizes, in pools of their own; recurrent states; and nothing but states.
MIXED = [(None, latents(6)), (latents(2), 5, states(8)), (None, states(4)), (latents(3), states(6)), (states(4),)]
MIXED += [(None, AttentionSpec(4, 1, 8, 4, chunk=8))]
MAX_MODEL_LEN = 40
# Encoder caches with whole runs and without, that have room for one picture or some, and none.
ENCODERS = [
    None,
    EncoderCacheConfig(3, 2, 6, whole_spans=True),
    EncoderCacheConfig(9, 1, 9),
    EncoderCacheConfig(8, 2, 20),
]
PICTURES = [(), (), (("x", (3,)),), (("y", (4,)),), (("x", (3,)), ("z", (1, 2))), (("y", (4,)), ("x", (3,)))]


class SchedulerMachine(RuleBasedStateMachine):
    """The engine under random demand."""

    @initialize(
        windows=st.sampled_from(WINDOWS + MIXED),
        spare_blocks=st.integers(0, 12),
        budget=st.integers(4, 24),
        depth=st.integers(1, 3),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 0, 5]),
        prefix_caching=st.sampled_from([True, True, False]),
        max_steps=st.sampled_from([1, 2, 7]),
        stingy=st.sampled_from([None, 1]),
        drafts=st.sampled_from([0, 0, 1, 6]),
        stages=st.sampled_from([1, 1, 2, 3]),
        kept=st.sampled_from([0, 0, 1, 2]),
        encoder=st.sampled_from(ENCODERS),
    )
    def start(
        self,
        windows,
        spare_blocks,
        budget,
        depth,
        policy,
        threshold,
        prefix_caching,
        max_steps,
        stingy,
        drafts,
        stages,
        kept,
        encoder,
    ):
        self.engine = Engine(
            num_blocks=tuple(1 + most // 2 + spare_blocks for most in needs_of(windows, MAX_MODEL_LEN, budget)),
            windows=windows,
            max_num_batched_tokens=budget,
            max_num_seqs=4,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=prefix_caching,
            depth=depth,
            max_steps=max_steps,
            stingy=stingy and random.Random(stingy),
            most_drafts=drafts,
            num_stages=1 if encoder else stages,
            encoder=encoder,
            scheduling_policy=policy,
            long_prefill_token_threshold=threshold,
            num_short_request_rows=kept,
        )
        self.num_added = 0

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(1, 5), min_size=1, max_size=6),
        max_tokens=st.integers(1, 14),
        priority=st.integers(0, 2),
        ignore_eos=st.booleans(),
        salt=st.sampled_from([None, None, "salt"]),
        again=st.booleans(),
        goes_on=st.booleans(),
        pictures=st.sampled_from(PICTURES),
        place=st.integers(0, 20),
    )
    def add(self, prefix, tail, max_tokens, priority, ignore_eos, salt, again, goes_on, pictures, place):
        ended, features = list(self.engine.ends), []
        if goes_on and ended:  # the next turn of a chat, of which the cache has almost all
            before = self.engine.requests[ended[-1]]
            features = before.mm_features
            prefix = [*before.prompt_token_ids, *self.engine.tokens[ended[-1]]][: MAX_MODEL_LEN - 7]
        if again and ended:
            self.engine.check_answers()
            request_id = ended[0]  # an id may be used again, even while old results are in flight
        else:
            request_id = f"r{self.num_added}"
        self.num_added += 1
        prompt = prefix + tail
        if pictures and self.engine.runner.encoder and not goes_on:
            prompt, features = illustrated(prompt, *[(min(place, len(prefix)), *each) for each in pictures])
            prompt = prompt[: MAX_MODEL_LEN - 1]
        options = {"max_tokens": max_tokens, "priority": priority, "ignore_eos": ignore_eos, "cache_salt": salt}
        try:
            self.engine.add(request_id, prompt, float(self.num_added), mm_features=features, **options)
        except RequestError as error:
            if not re.search("KV blocks|must be computed in one step|does not fit its prompt", str(error)):
                raise

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

    @rule(n=st.integers(1, 8), max_steps=st.sampled_from([1, 1, 2, 7]))
    def steps(self, n, max_steps):
        self.engine.max_steps = max_steps
        for _ in range(n):
            self.engine.step()

    @rule()
    def reset_prefix_cache(self):
        held = any(pool.num_held_blocks for pool in self.engine.scheduler.kv_cache_manager.pools)
        assert self.engine.scheduler.reset_prefix_cache() != held

    @rule()
    def lose_everything(self):
        self.engine.lose_everything()

    @rule(keeps=st.booleans())
    def change_weights(self, keeps):
        self.engine.change_weights(keeps=keeps)

    @rule(data=st.data())
    def hold(self, data):
        """Somebody outside takes a part of what a request has; he keeps it when the request is gone."""
        if running := self.engine.scheduler.running:
            request = data.draw(st.sampled_from(running))
            first = data.draw(st.integers(0, 3))
            self.engine.scheduler.kv_cache_manager.hold("a transfer", [table[first:] for table in request.blocks])

    @precondition(lambda self: self.engine.scheduler.kv_cache_manager.holds)
    @rule()
    def release(self):
        manager = self.engine.scheduler.kv_cache_manager
        manager.release(manager.holds[0])

    @invariant()
    def everything_is_accounted_for(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self):
        if hasattr(self, "engine"):
            manager = self.engine.scheduler.kv_cache_manager
            while manager.holds:
                manager.release(manager.holds[0])
            self.engine.run()


SchedulerMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestSchedulerMachine = pytest.mark.timeout(300)(SchedulerMachine.TestCase)


CROWDS = [(windows, depth, policy) for windows in WINDOWS for depth in (1, 2, 3) for policy in ("fcfs", "priority")]


@pytest.mark.parametrize(("windows", "depth", "policy"), CROWDS + [(kinds, 3, "fcfs") for kinds in MIXED], ids=str)
def test_crowds_that_share_prompts_get_the_right_answers(windows, depth, policy):
    """Long runs with too few blocks, so that preemption and eviction are frequent."""
    num_preemptions = num_hits = num_runs = num_drafts = 0
    for seed in range(5):
        draw = random.Random(f"{seed} {windows} {depth} {policy}")
        budget = draw.choice([4, 9, 24])
        engine = Engine(
            num_blocks=tuple(1 + most + draw.randint(0, 3) for most in needs_of(windows, MAX_MODEL_LEN, budget)),
            windows=windows,
            max_num_batched_tokens=budget,
            max_num_seqs=draw.choice([3, 6]),
            max_model_len=MAX_MODEL_LEN,
            depth=depth,
            max_steps=(1, 3, 5, 8, 4)[seed],
            most_drafts=5 if seed == 4 else 0,
            stingy=random.Random(seed) if seed % 2 else None,
            scheduling_policy=policy,
            long_prefill_token_threshold=draw.choice([0, 5]),
            num_short_request_rows=seed % 3,
        )
        run_crowd(engine, draw)
        stats = engine.scheduler.make_stats()
        num_preemptions += stats.num_preemptions
        num_hits += stats.prefix_cache_hits
        num_runs += engine.num_runs
        num_drafts += engine.scheduler.draft_lengths.num_drafts if seed == 4 else 0
    if set(windows) - {5, 9, 4, states(4)}:  # a window gives back as many blocks as it takes
        assert num_preemptions > 0, "the test is too easy"
    assert num_hits > 0, "the test shares nothing"
    assert num_runs > 0, "no run of decode steps"
    assert num_drafts > 0, "nobody drafts"


def run_crowd(engine: Engine, draw: random.Random) -> None:
    """Some 25 requests that come, and sometimes go, while others run."""
    for i in range(25):
        prompt = draw.choice(PREFIXES) + draw.choices(range(1, 6), k=draw.randint(1, 6))
        stop = {"ignore_eos": True, "stop_token_ids": []} if draw.random() < 0.5 else {}
        priority = draw.randint(0, 2)
        engine.add(f"r{i}", prompt, float(i), max_tokens=draw.randint(1, 16), priority=priority, **stop)
        for _ in range(draw.choice([0, 0, 1, 3])):
            engine.step()
        if draw.random() < 0.2 and engine.scheduler.requests:
            engine.abort(draw.choice(sorted(engine.scheduler.requests)))
    engine.run()
