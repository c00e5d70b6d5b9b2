"""What the scheduler decides, case by case. Random demand is in test_scheduler_machine.py."""

import pytest

from jaxpaged.config import SchedulerConfig
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.errors import ConfigError, EngineError, RequestError
from jaxpaged.kv_cache_spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from jaxpaged.messages import NOTHING_TO_DRAW, ModelRunnerOutput
from tests.core.simulation import EOS, STOP, Engine, expected_output, prompt_of

ENDLESS = {"ignore_eos": True, "stop_token_ids": []}


def scheduled_tokens(scheduled) -> dict[str, int]:
    return dict(zip(scheduled.request_ids, scheduled.num_scheduled_tokens))


def answer(scheduled, token: int) -> ModelRunnerOutput:
    """An output in which everybody sampled `token`."""
    ids = [request_id for request_id, most in zip(scheduled.request_ids, scheduled.max_sampled_tokens) if most]
    return ModelRunnerOutput(scheduled.step_id, ids, [[token]] * len(ids))


class TestBudget:
    def test_a_long_prompt_takes_several_steps_and_samples_in_the_last(self):
        engine = Engine(max_num_batched_tokens=4)
        engine.add("a", prompt_of(10))
        steps = [engine.dispatch() for _ in range(3)]
        assert [step.num_scheduled_tokens for step in steps] == [[4], [4], [2]]
        assert [step.num_computed_tokens for step in steps] == [[0], [4], [8]]
        assert [step.max_sampled_tokens for step in steps] == [[0], [0], [1]]

    def test_running_requests_go_first_and_prompts_fill_what_is_left(self):
        engine = Engine(max_num_batched_tokens=8)
        engine.add("a", prompt_of(6))
        engine.dispatch()
        engine.add("b", prompt_of(20, 1))
        assert scheduled_tokens(engine.dispatch()) == {"a": 1, "b": 7}

    def test_no_more_than_max_num_seqs_run(self):
        engine = Engine(max_num_seqs=2)
        for name in "abc":
            engine.add(name, prompt_of(3))
        assert engine.dispatch().request_ids == ["a", "b"]
        assert len(engine.scheduler.waiting) == 1
        engine.run()

    def test_one_prompt_takes_no_more_than_its_threshold_while_others_are_there(self):
        engine = Engine(long_prefill_token_threshold=4)
        engine.add("a", prompt_of(12))
        engine.add("b", prompt_of(3, 1))
        assert scheduled_tokens(engine.dispatch()) == {"a": 4, "b": 3}

    def test_the_threshold_is_no_limit_for_a_request_that_is_alone(self):
        engine = Engine(long_prefill_token_threshold=4)
        engine.add("a", prompt_of(12))
        assert scheduled_tokens(engine.dispatch()) == {"a": 12}

    def test_without_chunks_a_prompt_waits_until_it_fits_a_step(self):
        engine = Engine(max_num_batched_tokens=10, enable_chunked_prefill=False)
        engine.add("a", prompt_of(6))
        engine.add("b", prompt_of(9, 1))
        assert scheduled_tokens(engine.dispatch()) == {"a": 6}
        assert scheduled_tokens(engine.dispatch()) == {"a": 1, "b": 9}

    def test_a_threshold_without_chunks_is_refused(self):
        groups = (KVCacheGroup(AttentionSpec(4, 1, 8, 4), (0,)),)
        options = SchedulerConfig(
            max_num_batched_tokens=8, max_num_seqs=2, enable_chunked_prefill=False, long_prefill_token_threshold=4
        )
        with pytest.raises(ConfigError, match="long_prefill_token_threshold is 4, but chunked prefill is off"):
            Scheduler(options, KVCacheConfig((9,), groups), max_model_len=16, enable_prefix_caching=True)


class TestAdmission:
    def test_a_prompt_waits_until_all_of_it_would_fit(self):
        engine = Engine(num_blocks=9, max_num_batched_tokens=4, enable_prefix_caching=False)
        engine.add("a", prompt_of(20), max_tokens=2)  # 5 blocks and one more, of 8
        engine.add("b", prompt_of(16, 1), max_tokens=2)
        for _ in range(5):
            assert engine.dispatch().request_ids == ["a"]
        engine.run()

    def test_blocks_that_a_running_prompt_still_needs_are_not_promised_to_another(self):
        engine = Engine(num_blocks=9, max_num_batched_tokens=8, long_prefill_token_threshold=4)
        engine.add("a", prompt_of(20), max_tokens=1)  # holds 1 block after the first step, needs 5
        engine.add("b", prompt_of(16, 1), max_tokens=1)  # 4 of the 7 free blocks would do now
        assert scheduled_tokens(engine.dispatch()) == {"a": 4}
        engine.run()
        assert engine.scheduler.make_stats().num_preemptions == 0

    def test_the_head_of_the_queue_is_not_overtaken(self):
        engine = Engine(num_blocks=9, enable_prefix_caching=False)
        engine.add("a", prompt_of(16), max_tokens=2)
        engine.dispatch()
        engine.add("b", prompt_of(20, 1), max_tokens=2)
        engine.add("c", prompt_of(2, 2), max_tokens=2)
        assert engine.dispatch().request_ids == ["a"]

    def test_priority_orders_the_queue(self):
        engine = Engine(max_num_seqs=1, scheduling_policy="priority")
        engine.add("late", prompt_of(3), arrival_time=2.0)
        engine.add("early", prompt_of(3), arrival_time=1.0)
        engine.add("urgent", prompt_of(3), arrival_time=3.0, priority=-1)
        order = []
        while engine.scheduler.has_unfinished_requests():
            order += [r for r in engine.dispatch().request_ids if r not in order]
            engine.receive()
        assert order == ["urgent", "early", "late"]


class TestIntake:
    def check_refusal(self, engine, match, prompt, **options):
        with pytest.raises(RequestError, match=match):
            engine.add("a", prompt, **options)
        assert not engine.scheduler.has_unfinished_requests()

    def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(self):
        self.check_refusal(Engine(max_model_len=8), "has 8 tokens, but max_model_len is 8", prompt_of(8))

    def test_an_empty_prompt_is_refused(self):
        self.check_refusal(Engine(), "has no tokens", [])

    def test_unlimited_output_must_be_resolved_before(self):
        self.check_refusal(Engine(), "max_tokens None", prompt_of(3), max_tokens=None)

    def test_what_never_fits_is_refused_with_the_numbers(self):
        engine = Engine(num_blocks=6)
        self.check_refusal(
            engine,
            "may need 6 KV blocks of 4 tokens for 10 prompt tokens and max_tokens 12, but there are 5",
            prompt_of(10),
            max_tokens=12,
        )

    def test_what_just_fits_runs_to_its_end(self):
        engine = Engine(num_blocks=6)
        engine.add("a", prompt_of(10), max_tokens=11, **ENDLESS)  # 20 computed tokens, 5 blocks
        engine.run()
        assert len(engine.tokens["a"]) == 11

    def test_the_context_limits_what_a_request_may_need(self):
        engine = Engine(num_blocks=6, max_model_len=21)
        engine.add("a", prompt_of(10), max_tokens=1000, **ENDLESS)
        engine.run()
        assert len(engine.tokens["a"]) == 11
        assert engine.ends["a"].finish_reason == "length"

    def test_without_chunks_a_prompt_longer_than_a_step_is_refused(self):
        engine = Engine(max_num_batched_tokens=8, enable_chunked_prefill=False)
        self.check_refusal(engine, "a step holds max_num_batched_tokens = 8", prompt_of(9))

    def test_an_id_in_use_is_refused_and_free_again_afterwards(self):
        engine = Engine()
        engine.add("a", prompt_of(3))
        with pytest.raises(RequestError, match="'a' is in use"):
            engine.add("a", prompt_of(5))
        engine.run()
        engine.add("a", prompt_of(5))
        engine.run()


class TestStepsThatMayHaveFewerTokens:
    def test_prompts_are_cut_and_who_decodes_is_not_left_out(self):
        engine = Engine(max_num_batched_tokens=16)
        for name in "abc":
            engine.add(name, prompt_of(2), max_tokens=9)
        engine.step()
        engine.add("d", prompt_of(12))
        scheduled = engine.scheduler.schedule(max_tokens=2)
        assert scheduled.num_scheduled_tokens == [1, 1, 1] and scheduled.total_num_scheduled_tokens == 3
        engine.scheduler.update_from_output(scheduled, answer(scheduled, 7))
        scheduled = engine.scheduler.schedule(max_tokens=8)
        assert scheduled.num_scheduled_tokens == [1, 1, 1, 5] and scheduled.total_num_scheduled_tokens == 8

    def test_a_prompt_that_may_not_be_cut_is_whole(self):
        engine = Engine(max_num_batched_tokens=16, enable_chunked_prefill=False)
        engine.add("a", prompt_of(12))
        assert engine.scheduler.schedule(max_tokens=8).num_scheduled_tokens == [12]


class TestEnds:
    def finish_with(self, token, **options):
        engine = Engine()
        engine.add("a", prompt_of(3), **options)
        scheduled = engine.scheduler.schedule()
        (output,) = engine.scheduler.update_from_output(scheduled, answer(scheduled, token))
        return output.new_token_ids, output.finish_reason, output.stop_reason

    def test_end_of_sequence_has_no_stop_reason(self):
        assert self.finish_with(EOS) == ([EOS], "stop", None)

    def test_a_stop_token_is_its_own_reason(self):
        assert self.finish_with(STOP) == ([STOP], "stop", STOP)

    def test_end_of_sequence_comes_before_stop_tokens(self):
        assert self.finish_with(EOS, stop_token_ids=[EOS]) == ([EOS], "stop", None)

    def test_stopping_comes_before_length(self):
        assert self.finish_with(STOP, max_tokens=1) == ([STOP], "stop", STOP)

    def test_length_is_the_last_reason(self):
        assert self.finish_with(7, max_tokens=1) == ([7], "length", None)

    def test_end_of_sequence_can_be_ignored(self):
        assert self.finish_with(EOS, ignore_eos=True) == ([EOS], None, None)

    def test_an_ignored_end_of_sequence_may_still_be_a_stop_token(self):
        assert self.finish_with(EOS, ignore_eos=True, stop_token_ids=[EOS]) == ([EOS], "stop", EOS)


class TestAsynchronousScheduling:
    def test_the_next_token_is_scheduled_before_the_last_is_known(self):
        engine = Engine()
        engine.add("a", prompt_of(5))
        engine.dispatch()
        following = engine.dispatch()
        assert (following.num_computed_tokens, following.num_scheduled_tokens, following.max_sampled_tokens) == (
            [5],
            [1],
            [1],
        )
        assert engine.scheduler.requests["a"].num_output_placeholders == 2

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_nothing_is_scheduled_past_max_tokens(self, depth):
        engine = Engine(depth=depth)
        engine.add("a", prompt_of(5), max_tokens=3, **ENDLESS)
        steps = [engine.dispatch() for _ in range(5)]
        assert [len(step.request_ids) for step in steps] == [1, 1, 1, 0, 0]
        engine.run()

    @pytest.mark.parametrize("windows", [(None,), (None, 6)], ids=str)
    def test_requests_that_lost_their_blocks_go_on_in_their_order(self, windows):
        engine = Engine(windows=windows, max_num_seqs=3)
        for i in range(5):
            engine.add(f"r{i}", prompt_of(5 + i, i), float(i), max_tokens=8 + i, **ENDLESS)
        for _ in range(4):
            engine.step()
        engine.lose_everything()
        assert [request.request_id for request in engine.scheduler.waiting] == [f"r{i}" for i in range(5)]
        assert engine.scheduler.make_stats().num_preemptions == 3
        engine.run()

    def test_a_result_after_the_end_is_dropped(self):
        engine = Engine()
        engine.add("a", prompt_of(5))
        first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
        (output,) = engine.scheduler.update_from_output(first, answer(first, STOP))
        assert output.finish_reason == "stop"
        assert engine.scheduler.update_from_output(second, answer(second, 9)) == []
        engine.check_idle()

    def test_an_id_used_again_does_not_get_tokens_of_the_request_before(self):
        engine = Engine(depth=2)
        engine.add("a", prompt_of(5))
        engine.dispatch()
        engine.abort("a")
        engine.add("a", prompt_of(7, 1))
        scheduled = engine.dispatch()
        assert scheduled.removed_request_ids == ["a"]
        assert [new.request_id for new in scheduled.new_requests] == ["a"]
        assert engine.receive() == []
        engine.run()
        assert engine.tokens["a"] == expected_output(engine.requests["a"], engine.max_model_len)[0]

    def test_a_step_without_tokens_carries_nothing_and_what_ended_waits(self):
        engine = Engine()
        engine.add("a", prompt_of(5))
        engine.dispatch()
        engine.receive()
        engine.abort("a")
        empty = engine.scheduler.schedule()
        assert (empty.total_num_scheduled_tokens, empty.removed_request_ids) == (0, [])
        engine.add("b", prompt_of(5, 1))
        assert engine.dispatch().removed_request_ids == ["a"]

    def test_the_output_of_an_empty_step_may_come_or_not(self):
        engine = Engine()
        empty = engine.scheduler.schedule()
        assert engine.scheduler.update_from_output(empty, ModelRunnerOutput(empty.step_id, [], [])) == []

    def test_outputs_out_of_order_break_an_invariant(self):
        engine = Engine()
        engine.add("a", prompt_of(5))
        engine.dispatch()
        second = engine.dispatch()
        with pytest.raises(EngineError, match="no output came for step 1"):
            engine.scheduler.update_from_output(second, answer(second, 9))

    def test_the_output_of_another_step_breaks_an_invariant(self):
        engine = Engine()
        engine.add("a", prompt_of(5))
        first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
        with pytest.raises(EngineError, match="the output of step 2 came for step 1"):
            engine.scheduler.update_from_output(first, answer(second, 9))

    def test_a_missing_token_breaks_an_invariant(self):
        engine = Engine()
        engine.add("a", prompt_of(5))
        scheduled = engine.scheduler.schedule()
        with pytest.raises(EngineError, match=r"missing \['a'\]"):
            engine.scheduler.update_from_output(scheduled, ModelRunnerOutput(scheduled.step_id, [], []))


class TestPreemption:
    def crowd(self, **options) -> Engine:
        """Two requests of which each fits alone, and not both."""
        engine = Engine(num_blocks=8, **options)
        engine.add("a", prompt_of(8), 0.0, max_tokens=16, priority=1, **ENDLESS)
        engine.add("b", prompt_of(8, 1), 1.0, max_tokens=16, priority=0, **ENDLESS)
        return engine

    def run_until_preempted(self, engine) -> tuple[str, object]:
        while True:
            scheduled = engine.dispatch()
            if engine.scheduler.make_stats().num_preemptions:
                return next(r for r in engine.scheduler.waiting).request_id, scheduled
            if len(engine.in_flight) >= engine.depth:
                engine.receive()

    def test_the_youngest_gives_way(self):
        engine = self.crowd()
        victim, scheduled = self.run_until_preempted(engine)
        assert victim == "b"
        assert scheduled.request_ids == ["a"]
        assert scheduled.removed_request_ids == ["b"]
        engine.run()
        assert engine.ends["b"].num_preemptions == 1
        assert engine.ends["a"].num_preemptions == 0

    def test_the_least_important_gives_way_and_its_tokens_go_back_to_the_budget(self):
        engine = self.crowd(scheduling_policy="priority")
        victim, scheduled = self.run_until_preempted(engine)
        assert victim == "a"
        assert scheduled.request_ids == ["b"]
        assert scheduled.total_num_scheduled_tokens == 1
        engine.run()

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_a_token_in_flight_is_delivered_and_continued_from(self, depth):
        engine = self.crowd(depth=depth)
        self.run_until_preempted(engine)
        assert engine.scheduler.requests["b"].num_output_placeholders == depth - 1
        engine.run()

    def test_a_preempted_request_comes_back_with_its_output(self):
        engine = self.crowd(depth=2)
        self.run_until_preempted(engine)
        while True:
            while len(engine.in_flight) > 1:
                engine.receive()
            back = [new for new in engine.dispatch().new_requests if new.request_id == "b"]
            if back:
                break
        request = engine.requests["b"]
        assert back[0].token_ids == request.prompt_token_ids + engine.tokens["b"]
        assert back[0].num_prompt_tokens == 8
        assert len(engine.tokens["b"]) > 0
        engine.run()

    def test_a_preempted_request_may_end_by_the_token_in_flight(self):
        engine = self.crowd(depth=2)
        self.run_until_preempted(engine)
        scheduled, output = engine.in_flight.popleft()
        request = engine.scheduler.requests["b"]
        request.stop_ids = frozenset(token for tokens in output.sampled_token_ids for token in tokens)
        outputs = engine.scheduler.update_from_output(scheduled, output)
        assert [o.finish_reason for o in outputs if o.request_id == "b"] == ["stop"]
        assert not list(engine.scheduler.waiting)
        engine.scheduler.check_integrity()


class TestAbortAndFailure:
    def test_abort_tells_about_live_requests_only(self):
        engine = Engine(max_num_seqs=1)
        engine.add("a", prompt_of(5))
        engine.add("b", prompt_of(5))
        engine.dispatch()
        outputs = engine.scheduler.abort_requests(["b", "nobody", "a", "a"])
        assert [(o.request_id, o.new_token_ids, o.finish_reason) for o in outputs] == [
            ("b", [], "abort"),
            ("a", [], "abort"),
        ]
        assert engine.receive() == []
        engine.check_idle()

    def test_a_request_that_failed_ends_alone_and_leaves_nothing_in_the_cache(self):
        engine = Engine()
        for name, seed in (("a", 0), ("b", 1)):
            engine.add(name, prompt_of(8, seed), **ENDLESS)
        engine.dispatch()
        scheduled, output = engine.in_flight.popleft()
        output.failed = {"a": "logits are not numbers"}
        outputs = engine.record(engine.scheduler.update_from_output(scheduled, output))
        assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
            ("a", "error", "logits are not numbers"),
            ("b", None, None),
        ]
        engine.run()
        for name, seed, hit in (("c", 0, 0), ("d", 1, 4)):
            engine.add(name, prompt_of(8, seed))
            assert engine.dispatch().new_requests[-1].num_computed_tokens == hit

    def test_a_block_that_was_filled_by_a_failed_step_does_not_enter_the_cache(self):
        engine = Engine()
        engine.add("a", prompt_of(6), **ENDLESS)
        for _ in range(2):
            engine.step()
        engine.dispatch()
        scheduled, output = engine.in_flight.popleft()
        assert scheduled.num_computed_tokens == [7], "this step fills the second block"
        output.failed = {"a": "why"}
        engine.scheduler.update_from_output(scheduled, output)
        engine.add("b", prompt_of(6) + engine.tokens["a"] + [5])
        assert engine.dispatch().new_requests[0].num_computed_tokens == 0

    def test_a_failed_request_needs_no_token_in_the_output(self):
        engine = Engine()
        engine.add("a", prompt_of(8))
        scheduled = engine.scheduler.schedule()
        output = ModelRunnerOutput(scheduled.step_id, [], [], failed={"a": "why"})
        assert [o.error for o in engine.scheduler.update_from_output(scheduled, output)] == ["why"]
        engine.check_idle()

    @pytest.mark.parametrize(
        ("values", "fields"),
        [
            ({"allowed_token_ids": [5], "bad_words_token_ids": [[5, 5]]}, ["allowed_token_ids", "bad_words"]),
            ({"allowed_token_ids": [5], "min_tokens": 2}, ["allowed_token_ids", "min_tokens"]),
            ({"extra_args": {"mine": 1}}, ["extra_args"]),
            ({"logit_bias": {5: -100.0}}, []),
        ],
    )
    def test_where_nothing_can_be_drawn_the_requests_fields_are_to_blame(self, values, fields):
        engine = Engine()
        engine.add("a", prompt_of(8), **values)
        scheduled = engine.scheduler.schedule()
        output = ModelRunnerOutput(scheduled.step_id, [], [], failed={"a": NOTHING_TO_DRAW})
        [told] = engine.scheduler.update_from_output(scheduled, output)
        assert told.error_parameter == (fields[0] if fields else None)
        assert all(name in told.error for name in fields) and "no token can be drawn" in told.error

    def test_a_failed_step_takes_the_steps_after_it_along_and_nobody_else(self):
        engine = Engine(depth=2, max_num_batched_tokens=9, max_num_seqs=3)
        engine.add("a", prompt_of(8), **ENDLESS)
        first = engine.dispatch()
        engine.add("b", prompt_of(6, 1), **ENDLESS)  # only in the step after
        second = engine.dispatch()
        assert second.request_ids == ["a", "b"]
        engine.add("c", prompt_of(8), **ENDLESS)
        engine.in_flight.clear()
        outputs = engine.record(engine.scheduler.fail_requests(first, "the device is gone"))
        assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
            ("a", "error", "the device is gone"),
            ("b", "error", "the device is gone"),
        ]
        assert engine.record(engine.scheduler.fail_requests(second, "that one too")) == []
        assert engine.dispatch().new_requests[0].num_computed_tokens == 0, "a lost block was found in the cache"
        engine.run()

    def test_what_the_runner_did_not_hear_because_a_step_failed_is_said_again(self):
        engine = Engine()
        engine.add("a", prompt_of(8))
        engine.dispatch()
        engine.receive()
        engine.abort("a")
        engine.add("b", prompt_of(8, 1))
        lost = engine.scheduler.schedule()
        assert lost.removed_request_ids == ["a"]
        engine.record(engine.scheduler.fail_requests(lost, "not dispatched"))
        engine.add("c", prompt_of(8, 2))
        assert set(engine.scheduler.schedule().removed_request_ids) == {"a", "b"}

    def test_what_a_failed_step_wrote_is_not_found_even_if_its_request_is_gone(self):
        engine = Engine()
        engine.add("a", prompt_of(8))
        failed = engine.scheduler.schedule()
        engine.scheduler.abort_requests(["a"])
        engine.scheduler.fail_requests(failed, "the device is gone")
        engine.add("b", prompt_of(8))
        assert engine.scheduler.schedule().new_requests[0].num_computed_tokens == 0

    def test_what_steps_before_the_failed_one_wrote_stays(self):
        engine = Engine(depth=2)
        engine.add("a", prompt_of(8), **ENDLESS)
        engine.dispatch()
        failed = engine.dispatch()
        engine.receive()
        engine.abort("a")
        engine.scheduler.fail_requests(failed, "the device is gone")
        engine.add("b", prompt_of(8))
        assert engine.scheduler.schedule().new_requests[0].num_computed_tokens == 4

    def test_requests_can_be_failed_by_id(self):
        engine = Engine()
        engine.add("a", prompt_of(8))
        engine.add("b", prompt_of(8, 1))
        failed = engine.dispatch()
        outputs = engine.scheduler.fail_requests(["a", "nobody"], "why")
        assert [(o.request_id, o.error) for o in outputs] == [("a", "why")]
        engine.scheduler.fail_requests(["b"], "why")
        engine.in_flight.clear()
        engine.add("c", prompt_of(8))
        following = engine.scheduler.schedule()
        assert following.step_id == failed.step_id + 1
        assert following.new_requests[0].num_computed_tokens == 0
        (output,) = engine.scheduler.update_from_output(following, answer(following, 9))
        assert output.request_id == "c"


class TestStatistics:
    def test_stats_are_those_of_the_queues_and_the_last_step(self):
        engine = Engine(num_blocks=11, max_num_seqs=1)
        engine.add("a", prompt_of(8))
        engine.add("b", prompt_of(8))
        scheduled = engine.dispatch()
        for stats in (engine.scheduler.make_stats(scheduled), engine.scheduler.make_stats()):
            assert (stats.step_id, stats.num_scheduled_tokens) == (1, 8)
            assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 1)
            assert stats.kv_cache_usage == pytest.approx(0.2)
            assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (8, 0)
        engine.run()
        stats = engine.scheduler.make_stats()
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (16, 4)
        assert engine.ends["a"].num_cached_tokens == 0
        assert engine.ends["b"].num_cached_tokens == 4

    def test_the_engine_can_ask_whether_anything_is_left(self):
        engine = Engine()
        assert not engine.scheduler.has_unfinished_requests()
        engine.add("a", prompt_of(8), max_tokens=1)
        assert engine.scheduler.get_num_unfinished_requests() == 1
        engine.dispatch()
        assert engine.scheduler.has_unfinished_requests()
