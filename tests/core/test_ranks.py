"""Several attention ranks behind one scheduler's face: every answer right, every rank's blocks conserved, and requests
where their beginnings are cached or where there is little to do."""

import random

import numpy as np
import pytest

from jaxpaged.core.ranks import RankedScheduler, divided, joined
from jaxpaged.errors import RequestError
from jaxpaged.messages import ModelRunnerOutput, PromptLogprobs, SampledLogprobs, SchedulerOutput
from tests.core.simulation import Engine, prompt_of


class RankedEngine(Engine):
    """The simulation with a scheduler and a runner for each rank, whose parts of a step are computed together."""

    def __init__(self, num_ranks, **options):
        engines = [Engine(**options) for _ in range(num_ranks)]
        super().__init__(**options)
        schedulers = iter([each.scheduler for each in engines])
        self.scheduler = RankedScheduler(lambda: next(schedulers), num_ranks)
        self.engines = engines
        self.num_uneven = 0  # runs in which a rank has less to do, or nothing

    def dispatch(self):
        scheduled = self.scheduler.schedule(self.max_steps)
        self.num_runs += scheduled.num_steps > 1
        self.num_uneven += scheduled.num_steps > min(part.num_steps for part in scheduled.ranks)
        self.scheduler.check_integrity()
        parts = [each.runner.execute(part) for each, part in zip(self.engines, scheduled.ranks, strict=True)]
        output = ModelRunnerOutput(
            scheduled.step_id,
            [name for part in parts for name in part.request_ids],
            [tokens for part in parts for tokens in part.sampled_token_ids],
        )
        if scheduled.total_num_scheduled_tokens:
            self.in_flight.append((scheduled, output))
            self.check_cache()
        return scheduled

    def step(self):
        while len(self.in_flight) < self.depth and self.dispatch().total_num_scheduled_tokens:
            pass
        return self.receive() if self.in_flight else []

    def check_cache(self):
        for each in self.engines:
            each.books = self.books
            each.check_cache()

    def check_idle(self):
        assert self.scheduler.get_num_unfinished_requests() == 0
        for each in self.engines:
            each.check_idle()

    def run(self, max_steps=2000):
        while self.scheduler.get_num_unfinished_requests():
            self.step()
            max_steps -= 1
            assert max_steps, "requests do not finish"
        while self.in_flight:
            self.receive()
        self.check_answers()
        self.check_idle()

    def rank_of(self, request_id):
        (rank,) = [i for i, each in enumerate(self.scheduler.ranks) if request_id in each.requests]
        return rank


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize(("seed", "max_steps"), [(0, 1), (1, 1), (2, 1), (3, 1), (1, 4), (2, 5), (4, 3), (5, 8)])
def test_random_traffic_over_ranks_gives_every_request_its_own_tokens(windows, seed, max_steps):
    """With so few blocks that requests are preempted, with aborts, failed steps, lost caches and ids used again."""
    chance = random.Random(seed)
    engine = RankedEngine(
        1 + seed % 3,
        windows=windows,
        num_blocks=1 + 14 * len(windows),
        max_num_seqs=4,
        depth=1 + seed % 2,
        max_steps=max_steps,
    )
    beginnings = [prompt_of(length, each) for each in range(3) for length in (0, 8, 13)]
    preemptions = 0
    for number in range(60):
        name = f"r{number}"
        engine.add(
            name, chance.choice(beginnings) + prompt_of(chance.randint(1, 6), number), max_tokens=chance.randint(1, 9)
        )
        for _ in range(chance.randint(0, 3)):
            engine.step()
        if chance.random() < 0.1:
            engine.abort(*chance.sample(list(engine.requests), 2), "nobody")
        if chance.random() < 0.05 and engine.in_flight:
            scheduled, _ = engine.in_flight[0]
            engine.in_flight.clear()
            engine.record(engine.scheduler.fail_requests(scheduled, "it failed"))
            for each in engine.engines:
                each.runner.hears_removals_again = True
        if chance.random() < 0.05:
            while engine.in_flight:
                engine.receive()
            engine.scheduler.preempt_all()
            engine.scheduler.kv_cache_manager.lose_content()
            assert not engine.scheduler.running
        preemptions = max(preemptions, engine.scheduler.make_stats().num_preemptions)
    engine.run()
    assert preemptions > 0 and engine.scheduler.reset_prefix_cache()
    assert (engine.num_runs > 0) == (max_steps > 1)
    assert engine.num_uneven > 0 or max_steps == 1


def test_requests_go_where_there_is_least_to_do_and_their_beginning_is_cached():
    engine = RankedEngine(3, num_blocks=100)
    for number in range(6):
        engine.add(f"r{number}", prompt_of(5, number))
    assert [engine.rank_of(f"r{number}") for number in range(6)] == [0, 1, 2, 0, 1, 2]
    engine.run()
    engine.add("first", prompt_of(40, 9), max_tokens=1)
    rank = engine.rank_of("first")
    engine.run()
    engine.add("again", [*prompt_of(40, 9), 5, 6], max_tokens=1)
    assert engine.rank_of("again") == rank
    engine.run()
    assert engine.scheduler.make_stats().prefix_cache_hits == 40


def test_a_run_is_one_of_all_ranks_or_none():
    """Whoever has a prompt to compute, or waits, is in the way of all; who has little to do, or nothing, is not."""
    engine = RankedEngine(3, num_blocks=100, max_steps=4, max_num_seqs=1)
    engine.add("long", prompt_of(4, 1), max_tokens=20)
    engine.add("short", prompt_of(4, 2), max_tokens=2)
    assert engine.dispatch().num_steps == 1
    engine.receive()
    run = engine.dispatch()
    assert run.num_steps == 4 and [part.num_steps for part in run.ranks] == [4, 1, 1]
    assert [part.max_sampled_tokens for part in run.ranks] == [[4], [1], []]
    engine.receive()
    engine.add("new", prompt_of(30, 3), max_tokens=2)
    engine.add("newer", prompt_of(30, 4), max_tokens=2)
    engine.add("newest", prompt_of(30, 5), max_tokens=2)
    assert [engine.dispatch().num_steps for _ in range(2)] == [1, 1], "prompts take two steps"
    while engine.in_flight:
        engine.receive()
    assert engine.scheduler.ranks[0].waiting and engine.dispatch().num_steps == 1, "somebody waits for the only row"
    engine.run()


def test_a_prompt_of_one_rank_is_in_the_way_of_a_run_of_another():
    engine = RankedEngine(2, num_blocks=100, max_steps=4)
    engine.add("long", prompt_of(4, 1), max_tokens=20)
    engine.dispatch()
    engine.receive()
    engine.add("new", prompt_of(30, 3), max_tokens=2)
    assert (engine.rank_of("long"), engine.rank_of("new")) == (0, 1)
    scheduled = engine.dispatch()
    assert scheduled.num_steps == 1 and scheduled.request_ids == ["long", "new"]
    engine.run()


def test_each_rank_has_a_budget_rows_and_blocks_of_its_own():
    engine = RankedEngine(2, max_num_batched_tokens=8, max_num_seqs=1, num_blocks=12)
    for number in range(3):
        engine.add(f"r{number}", prompt_of(8, number))
    scheduled = engine.dispatch()
    assert [part.num_scheduled_tokens for part in scheduled.ranks] == [[8], [8]]
    assert scheduled.total_num_scheduled_tokens == 16 and scheduled.num_scheduled_tokens == [8, 8]
    assert [part.new_requests[0].block_ids for part in scheduled.ranks] == [([1, 2],), ([1, 2],)]
    stats = engine.scheduler.make_stats(scheduled)
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_scheduled_tokens) == (2, 1, 16)
    assert stats.kv_cache_usage == pytest.approx(2 / 11)
    shown = engine.scheduler.kv_cache_manager.block_map(engine.scheduler.running)
    assert len(shown.owner) == 1 + 2 * 11 and shown.request_ids == ["r0", "r1"]
    assert [np.flatnonzero(shown.owner == each).tolist() for each in (0, 1)] == [[1, 2], [12, 13]]


def test_an_id_is_in_use_whatever_rank_has_it_and_the_cache_is_kept_while_one_rank_computes():
    engine = RankedEngine(2)
    engine.add("a", prompt_of(5))
    for _ in range(2):
        with pytest.raises(RequestError, match="in use"):
            engine.add("a", prompt_of(5, 1))
    engine.dispatch()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.reset_prefix_cache()


def test_what_comes_of_a_step_is_divided_as_the_step_was():
    lines = lambda *numbers: SampledLogprobs(np.array(numbers)[:, None], np.array(numbers)[:, None], np.array(numbers))
    part = lambda names, most: SchedulerOutput(
        7, [], [], names, [1] * len(most), [0] * len(most), most, [None] * len(most)
    )
    parts = [part(["a", "b"], [1, 0]), part([], []), part(["c", "d"], [1, 1])]
    whole = joined(parts)
    assert whole.request_ids == ["a", "b", "c", "d"] and whole.ranks is parts
    scored = PromptLogprobs(1, *[np.zeros((1, 1))] * 2, np.zeros(1))
    output = ModelRunnerOutput(
        7, ["a", "c", "d"], [[1], [], [3]], lines(10, 30), {"b": scored}, {"c": "no number"}, corrupted=["c"]
    )
    first, nothing, last = divided(output, whole.ranks)
    assert (first.request_ids, first.sampled_token_ids, list(first.prompt_logprobs)) == (["a"], [[1]], ["b"])
    assert first.logprobs.ranks.tolist() == [10] and last.logprobs.ranks.tolist() == [30]
    assert nothing.request_ids == [] and first.failed == {} and nothing.corrupted == []
    assert (last.request_ids, last.failed, last.corrupted) == (["c", "d"], {"c": "no number"}, ["c"])
