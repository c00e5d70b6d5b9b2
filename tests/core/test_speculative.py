"""How many tokens are drafted, and what becomes of drafts in the scheduler."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.speculative import NUM_ENOUGH, NUM_PLAIN, PATIENCE, TRIAL, DraftLengths, DraftRecord, StepTimes
from jaxpaged.messages import ModelRunnerOutput, SchedulerOutput, SchedulerStats
from tests.core.simulation import BLOCK_SIZE, STOP, Engine, ForcedLengths, prompt_of

MOST = 4
PLAIN = NUM_PLAIN + 1  # steps without drafts until there are any; the first is not measured
FIRST = NUM_ENOUGH + 1  # steps with the first drafts until their price is known


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Traffic:
    """Requests that decode, steps that take what they are said to take, and drafts that are as good as they are."""

    def __init__(self, num_requests, price, *accepted, buckets=(), after_change=0.0):
        self.clock, self.stats = Clock(), SchedulerStats()
        self.lengths = DraftLengths(MOST, self.stats, buckets, self.clock)
        self.price, self.accepted = price, accepted
        self.last, self.after_change = 0, after_change
        self.requests = {}
        for i in range(num_requests):
            params = SimpleNamespace(extra_args=None)
            self.requests[f"r{i}"] = request = SimpleNamespace(
                sampling_params=params,
                drafts=None,
                num_drafts=0,
                decode_limit=9,
                is_finished=False,
                max_total_tokens=99,
            )
            self.lengths.begin(request)
        self.step_id = 0
        self.padded = lambda num_tokens: next((size for size in buckets if size >= num_tokens), num_tokens)

    def step(self):
        """One step with the drafts that are wanted; returns how many each request has."""
        self.step_id += 1
        asked, left = [], self.lengths.most_in_step
        for request in self.requests.values():
            asked.append(min(request.num_drafts, left))
            left -= asked[-1]
        most, num = [1 + n for n in asked], len(asked)
        scheduled = SchedulerOutput(self.step_id, [], [], list(self.requests), most, [0] * num, most, [None] * num)
        self.lengths.note(self.step_id)
        self.clock.now += self.after_change * (sum(asked) != self.last)
        self.last = sum(asked)
        self.clock.now += 1 + self.price * (self.padded(num + sum(asked)) - self.padded(num)) / num
        tokens = [[7] * (1 + min(n, accepted)) for n, accepted in zip(asked, self.accepted)]
        output = ModelRunnerOutput(self.step_id, list(self.requests), tokens, num_drafts=asked if any(asked) else None)
        self.lengths.observe(self.requests, scheduled, output)
        return asked


def test_nothing_is_drafted_before_steps_without_drafts_were_measured():
    traffic = Traffic(1, 0.05, MOST)
    asked = [traffic.step()[0] for _ in range(PLAIN + 3)]
    assert asked[:PLAIN] == [0] * PLAIN and all(asked[PLAIN:])


def test_good_drafts_grow_as_long_as_they_may_and_bad_ones_cease():
    traffic = Traffic(2, 0.1, MOST, 0)
    for _ in range(PATIENCE - 1):
        good, bad = traffic.step()
    assert (good, bad) == (MOST, 0)


def test_drafts_that_cost_more_than_they_bring_cease_however_good_they_are():
    traffic = Traffic(8, 1.5, *[MOST] * 8)
    asked = [traffic.step() for _ in range(PATIENCE // 2)]
    assert all(map(any, asked[PLAIN : PLAIN + FIRST]))
    assert not any(map(any, asked[PLAIN + FIRST :])), "the first prices are believed"


def test_drafts_fill_the_bucket_in_which_they_cost_least():
    traffic = Traffic(8, 0.4, *[MOST] * 8, buckets=(2, 8, 16, 32, 64))
    asked = [sum(traffic.step()) for _ in range(PATIENCE)]
    assert set(asked[PLAIN : PLAIN + FIRST]) == {8}, "the smallest are measured first"
    assert set(asked[PLAIN + FIRST :]) == {24}, "40 tokens are padded to 64"


def test_drafts_in_place_of_padding_cost_nothing():
    traffic = Traffic(5, 3.0, *[MOST] * 5, buckets=(2, 8, 16, 32))
    assert [sum(traffic.step()) for _ in range(PATIENCE)][-1] == 3


def test_steps_behind_one_of_another_size_are_not_measured():
    """They take longer; and a moment in which everything does is not believed for ever."""
    traffic = Traffic(1, 0.1, MOST, after_change=3.0)
    assert [traffic.step()[0] for _ in range(PATIENCE)][-1] == MOST
    traffic.price = 9.0
    while traffic.step()[0]:
        pass
    traffic.price = 0.1
    asked = [traffic.step()[0] for _ in range(40 * PATIENCE)]
    assert set(asked[-PATIENCE // 2 :]) == {MOST}


@pytest.mark.parametrize(("accepted", "price"), [(0, 0.1), (0, 1.5), (MOST, 1.5), (1, 0.7)])
@pytest.mark.parametrize("num_requests", [1, 5, 8])
def test_drafts_never_lose_more_than_trying_them_costs(num_requests, accepted, price):
    """In steps of which each without drafts takes a second."""
    traffic = Traffic(num_requests, price, *[accepted] * num_requests, buckets=(2, 8, 16, 32, 64))
    num_steps, num_more = 1000, 0
    for _ in range(num_steps):
        num_more += sum(min(n, accepted) for n in traffic.step())
    assert num_requests * num_steps + num_more > 0.97 * num_requests * traffic.clock.now


def test_bad_drafts_are_tried_again_now_and_then():
    traffic = Traffic(1, 0.1, 0)
    asked = [traffic.step()[0] for _ in range(10 * PATIENCE)]
    tries = sum(n > 0 for n in asked[PATIENCE:])
    assert 10 <= tries <= 20
    traffic.accepted = (MOST,)
    assert sum(traffic.step()[0] for _ in range(3 * PATIENCE)) > PATIENCE, "the text repeats itself from here on"


def test_where_nothing_is_worth_drafting_that_is_not_thought_over_in_each_step(monkeypatch):
    traffic = Traffic(2, 0.3, 0, 0)
    while any(traffic.step()) or traffic.step_id < PATIENCE:
        pass
    asked, thought = [], []
    lots = StepTimes.lots
    monkeypatch.setattr(StepTimes, "lots", lambda *args: thought.append(1) or lots(*args))
    asked += [sum(traffic.step()) for _ in range(20 * PATIENCE)]
    tries = sum(map(bool, asked))
    assert 0 < tries < 20 * TRIAL and tries <= len(thought) <= 3 * tries


def test_a_new_request_is_as_promising_as_the_drafts_of_others_were_and_is_thought_of_at_once():
    promising = []
    for accepted in (0, 1, MOST):
        traffic = Traffic(1, 0.05, accepted)
        for _ in range(2 * PATIENCE):
            traffic.step()
        (request,) = traffic.requests.values()
        request.drafts, request.num_drafts = None, 0
        traffic.lengths.begin(request)
        promising.append(request.drafts.worth(0.1))
        traffic.step()
        assert request.num_drafts
    assert promising[0] < promising[1] < promising[2] == MOST


def test_a_request_may_want_fewer_drafts_or_none():
    traffic = Traffic(1, 0.0, MOST)
    request = traffic.requests["r0"]
    for wanted in (0, 2, 99):
        request.sampling_params.extra_args, request.drafts = {"num_speculative_tokens": wanted}, None
        traffic.lengths.begin(request)
        assert max(traffic.step()[0] for _ in range(2 * PATIENCE)) == min(wanted, MOST)


def test_what_was_drafted_and_accepted_is_counted_by_its_place():
    traffic = Traffic(1, 0.0, 2)
    drafted = [n for n in (traffic.step()[0] for _ in range(40)) if n]
    stats = traffic.stats
    assert (stats.num_drafts, stats.num_draft_tokens) == (len(drafted), sum(drafted))
    expected = [sum(min(n, 2) > place for n in drafted) for place in range(MOST)]
    assert stats.num_accepted_per_pos == expected and stats.num_accepted_tokens == sum(expected)


@given(accepted=st.lists(st.integers(0, MOST), max_size=30), price=st.floats(0, 2))
def test_more_is_worth_it_where_drafts_are_better_or_cheaper(accepted, price):
    record, better = DraftRecord(MOST), DraftRecord(MOST)
    for n in accepted:
        record.add(n, MOST), better.add(min(n + 1, MOST), MOST)
    assert 0 <= record.worth(price) <= better.worth(price) <= MOST
    assert record.worth(price + 0.1) <= record.worth(price)


# ---- in the scheduler ------------------------------------------------------------------------------


def engine_of(*prompts, drafts=3, max_tokens=20, **options):
    """Requests that have their first tokens and want drafts, with nothing in flight."""
    engine = Engine(most_drafts=drafts, **options)
    engine.scheduler.draft_lengths = ForcedLengths(lambda: drafts)
    for i, prompt in enumerate(prompts):
        engine.add(f"r{i}", prompt, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=[])
    engine.step()
    return engine


def answer(scheduled, *tokens):
    num_drafts = [most - 1 for most in scheduled.max_sampled_tokens if most]
    return ModelRunnerOutput(scheduled.step_id, list(scheduled.request_ids), list(tokens), num_drafts=num_drafts)


def test_a_step_with_drafts_has_slots_and_placeholders_for_all_of_them():
    engine = engine_of(prompt_of(3), prompt_of(5))
    scheduled = engine.scheduler.schedule(6)
    assert (scheduled.num_steps, scheduled.num_scheduled_tokens, scheduled.max_sampled_tokens) == (1, [4, 4], [4, 4])
    for request, tokens in zip(engine.scheduler.running, (3, 5)):
        assert request.num_output_placeholders == 4
        assert len(request.blocks[0]) == -(-(tokens + 4) // BLOCK_SIZE)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_what_is_rejected_at_any_place_is_taken_back(num_tokens):
    engine = engine_of(prompt_of(3))
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    engine.scheduler.update_from_output(first, answer(first, [7] * num_tokens))
    (request,) = engine.scheduler.running
    assert (request.num_computed_tokens, request.num_tokens) == (3 + num_tokens + 4, 4 + num_tokens)
    engine.scheduler.update_from_output(second, answer(second, [8]))
    assert (request.num_computed_tokens, request.num_output_placeholders) == (4 + num_tokens, 0)
    engine.scheduler.check_integrity()


def test_drafts_go_no_further_than_the_request_may():
    engine = engine_of(prompt_of(3), max_tokens=4)
    scheduled = engine.scheduler.schedule()
    assert scheduled.max_sampled_tokens == [3]
    (output,) = engine.scheduler.update_from_output(scheduled, answer(scheduled, [7, 8, 9]))
    assert output.finish_reason == "length"
    engine.check_idle()


def test_a_stop_token_among_accepted_drafts_drops_those_behind_it_and_is_not_cached():
    prompt = prompt_of(5)
    engine = engine_of(prompt)
    first = engine.tokens["r0"]
    scheduled, later = engine.scheduler.schedule(), engine.scheduler.schedule()
    engine.scheduler.running[0].stop_ids = frozenset([STOP])
    (output,) = engine.scheduler.update_from_output(scheduled, answer(scheduled, [5, STOP, 8, 9]))
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([5, STOP], "stop", STOP)
    assert engine.scheduler.update_from_output(later, answer(later, [3])) == []
    engine.add("again", [*prompt, *first, 5, STOP, 7])
    assert engine.scheduler.schedule().new_requests[0].num_computed_tokens == BLOCK_SIZE


def test_drafts_take_neither_the_budget_nor_the_blocks_of_others():
    engine = engine_of(*[prompt_of(3, seed) for seed in range(4)], max_num_batched_tokens=12, drafts=6)
    assert engine.scheduler.schedule().max_sampled_tokens == [7, 3, 1, 1]
    tight = engine_of(prompt_of(7, 1), prompt_of(7, 2), num_blocks=1 + 4, max_tokens=8)
    assert tight.dispatch().max_sampled_tokens == [1, 1]
    assert tight.scheduler.make_stats().num_preemptions == 0
    tight.run()


def test_a_request_that_follows_a_grammar_drafts_and_needs_masks_where_its_tokens_are_not_free():
    for num_free, masked in ((4, False), (3, True), (0, True)):
        engine = engine_of(prompt_of(5), prompt_of(6, 1))
        request = engine.scheduler.requests["r1"]
        request.matcher = SimpleNamespace(num_free=lambda num_unknown, free=num_free: free)
        engine.scheduler.structured_output_manager.bound.add(request)
        scheduled = engine.scheduler.schedule()
        assert (scheduled.max_sampled_tokens, scheduled.masked) == ([4, 4], masked)


def test_a_prompt_is_computed_beside_drafts():
    engine = engine_of(prompt_of(3), max_num_batched_tokens=12)
    engine.add("late", prompt_of(20))
    scheduled = engine.dispatch()
    assert (scheduled.num_scheduled_tokens, scheduled.max_sampled_tokens) == ([4, 8], [4, 0])
    engine.run()
