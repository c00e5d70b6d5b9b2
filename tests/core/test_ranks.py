"""A scheduler of several attention ranks: every answer right, every rank's blocks conserved, and requests
where their beginnings are cached or where there is little to do."""

import random

import numpy as np
import pytest

from jaxpaged.errors import RequestError
from jaxpaged.messages import ModelRunnerOutput, PromptLogprobs, SampledLogprobs
from tests.core.simulation import Engine, prompt_of


class RankedEngine(Engine):
    """The simulation with a runner for each rank, whose parts of a step are computed together."""

    def __init__(self, num_ranks, **options):
        super().__init__(num_ranks=num_ranks, **options)
        self.runners = [self.runner, *[Engine(**options).runner for _ in range(1, num_ranks)]]
        self.num_uneven = 0  # runs in which a rank has less to do, or nothing

    def dispatch(self):
        scheduled = self.scheduler.schedule(self.max_steps)
        self.num_runs += scheduled.num_steps > 1
        self.num_uneven += scheduled.num_steps > min(part.num_steps for part in scheduled.parts)
        self.scheduler.check_integrity()
        parts = [runner.execute(part) for runner, part in zip(self.runners, scheduled.parts, strict=True)]
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
        for rank, runner in zip(self.scheduler.ranks, self.runners):
            self.check_cache_of(rank.kv_cache_manager, runner)

    def rank_of(self, request_id):
        return self.scheduler.requests[request_id].rank


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
            for runner in engine.runners:
                runner.hears_removals_again = True
        if chance.random() < 0.05:
            while engine.in_flight:
                engine.receive()
            engine.scheduler.preempt_all()
            engine.scheduler.lose_content()
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
    shown = engine.scheduler.block_map()
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


def test_each_rank_takes_its_part_of_a_step_and_of_its_output():
    engine = RankedEngine(3)
    names = ("a", "c", "d")
    for number, name in enumerate(names):
        engine.add(name, prompt_of(5, number), logprobs=1)
    scheduled = engine.scheduler.schedule()
    assert scheduled.request_ids == [*names] and [part.request_ids for part in scheduled.ranks] == [[n] for n in names]
    numbers = np.array([[10, 11], [30, 31]])
    lines = SampledLogprobs(numbers, numbers / 8, numbers[:, 0])
    failed = {"c": "no number"}
    output = ModelRunnerOutput(1, [*names], [[7], [], [9]], lines, failed=failed, corrupted=["c"])
    results = {each.request_id: each for each in engine.scheduler.update_from_output(scheduled, output)}
    assert [results[name].new_token_ids for name in names] == [[7], [], [9]]
    assert [results[name].new_logprobs[0].rank for name in ("a", "d")] == [10, 30]
    assert [results[name].finish_reason for name in names] == [None, "error", None]
    assert engine.scheduler.make_stats().num_corrupted_reqs == 1 and not engine.scheduler.ranks[1].running
    engine.scheduler.check_integrity()


def test_a_prompt_of_any_rank_gets_its_log_probabilities():
    engine = RankedEngine(2)
    engine.add("a", prompt_of(3))
    engine.add("b", prompt_of(3, 1), prompt_logprobs=0)
    scheduled = engine.scheduler.schedule()
    scored = PromptLogprobs(1, np.array([[4], [5]]), np.zeros((2, 1)), np.array([1, 2]))
    output = ModelRunnerOutput(1, ["a", "b"], [[7], [9]], prompt_logprobs={"b": scored})
    first, second = engine.scheduler.update_from_output(scheduled, output)
    assert first.prompt_logprobs is None and [line.rank for line in second.prompt_logprobs] == [1, 2]
