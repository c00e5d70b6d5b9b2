"""Where a step ends among pictures, what it encodes, and what the encoder cache keeps, against a simulated device."""

import random
from dataclasses import replace

import pytest

from jaxpaged.errors import ConfigError, RequestError
from jaxpaged.kv_cache_spec import EncoderCacheConfig
from jaxpaged.messages import SchedulerOutput
from tests.core.simulation import Engine, illustrated, needs_of, picture, prompt_of
from tests.core.test_scheduler import scheduled_tokens

ENDLESS = {"ignore_eos": True, "stop_token_ids": []}


def sees(num_pages: int = 16, page_size: int = 2, max_step_embeds: int = 32, whole: bool = False) -> EncoderCacheConfig:
    return EncoderCacheConfig(num_pages, page_size, max_step_embeds, whole)


def engine_of(encoder: EncoderCacheConfig, **options) -> Engine:
    return Engine(**{"encoder": encoder, "max_num_batched_tokens": 16, "enable_prefix_caching": False, **options})


def add(engine: Engine, request_id: str, prompt, *pictures, **options) -> None:
    tokens, features = illustrated(prompt, *pictures)
    engine.add(request_id, tokens, mm_features=features, **{"max_tokens": 2, **ENDLESS, **options})


def names(scheduled: SchedulerOutput) -> list[str]:
    """Of the pictures that a step encodes."""
    return [each.feature.key.rstrip(b".").decode() for each in scheduled.encoder_inputs]


def steps_of(engine: Engine) -> list[tuple[dict[str, int], list[str]]]:
    """The tokens of all steps, and what they encode, until prompts are computed."""
    steps = []
    while not steps or set(steps[-1][0].values()) != {1}:
        scheduled = engine.dispatch()
        steps.append((scheduled_tokens(scheduled), names(scheduled)))
    engine.run()
    return steps[:-1]


class TestWindows:
    def test_a_picture_is_encoded_in_the_step_that_first_needs_it(self):
        engine = engine_of(sees(), max_num_batched_tokens=8)
        add(engine, "a", prompt_of(16), (10, "x", (6,)), (13, "y", (2,)))
        assert steps_of(engine) == [({"a": 8}, []), ({"a": 8}, ["x"]), ({"a": 8}, ["y"])]

    def test_a_picture_that_is_a_prompts_last_token_is_taken_before_the_request_decodes(self):
        engine = engine_of(sees(num_pages=4), max_num_batched_tokens=6)
        add(engine, "a", prompt_of(6), (6, "x", (1,)))
        assert steps_of(engine) == [({"a": 6}, ["x"])]

    def test_its_pages_are_told_once(self):
        engine = engine_of(sees(page_size=4), max_num_batched_tokens=4)
        add(engine, "a", prompt_of(4), (2, "x", (7,)))
        told = [engine.dispatch().encoder_pages for _ in range(3)]
        ((request_id, index, page_ids),) = told[0]
        assert (request_id, index, len(page_ids), told[1:]) == ("a", 0, 2, [[], []])
        engine.run()

    def test_text_before_a_picture_is_computed_when_the_picture_has_to_wait(self):
        engine = engine_of(sees(max_step_embeds=6))
        add(engine, "a", prompt_of(8), (4, "x", (4,)), (6, "y", (4,)))
        assert steps_of(engine) == [({"a": 10}, ["x"]), ({"a": 6}, ["y"])]

    def test_a_request_without_room_at_its_picture_waits(self):
        engine = engine_of(sees(num_pages=3), max_num_batched_tokens=6)
        add(engine, "a", prompt_of(4), (2, "x", (6,)))
        add(engine, "b", prompt_of(3), (0, "y", (6,)))
        assert steps_of(engine) == [({"a": 6}, ["x"]), ({"a": 4}, []), ({"a": 1, "b": 5}, ["y"]), ({"b": 4}, [])]

    def test_what_one_cannot_use_is_for_those_behind_it(self):
        engine = engine_of(sees(max_step_embeds=4), max_num_batched_tokens=20)
        add(engine, "a", prompt_of(12), (1, "x", (4,)), (2, "y", (4,)))
        engine.add("b", prompt_of(12, 1), max_tokens=2, **ENDLESS)
        assert steps_of(engine)[0] == ({"a": 6, "b": 12}, ["x"])

    @pytest.mark.parametrize(
        ("lengths", "budget", "expected"),
        [((8,), 8, [5, 8, 5, 8, 4]), ((8,), 11, [5, 11, 11, 3]), ((3, 3, 2), 7, [5, 7, 7, 5, 7, 3])],
    )
    def test_runs_that_must_not_be_cut_are_not(self, lengths, budget, expected):
        engine = engine_of(sees(whole=True), max_num_batched_tokens=budget)
        add(engine, "a", prompt_of(14), (5, "x", lengths), (10, "y", lengths))
        steps, end = [], engine.scheduler.requests["a"].num_prompt_tokens
        while sum(steps) < end:
            steps.append(scheduled_tokens(engine.dispatch())["a"])
        assert steps == expected
        engine.run()

    @pytest.mark.parametrize(("threshold", "most", "expected"), [(2, None, [2, 1, 7, 2, 1]), (0, 2, [3, 7, 2, 1])])
    def test_neither_a_threshold_nor_uncompiled_programs_cut_a_run(self, threshold, most, expected):
        engine = engine_of(sees(whole=True), long_prefill_token_threshold=threshold)
        add(engine, "a", prompt_of(6), (3, "x", (7,)))
        engine.add("b", prompt_of(30, 1), max_tokens=2, **ENDLESS)
        steps = []
        while engine.scheduler.requests["a"].num_computed_tokens < 13:
            scheduled = engine.scheduler.schedule(max_tokens=most)
            engine.in_flight.append((scheduled, engine.runner.execute(scheduled)))
            steps.append(scheduled_tokens(scheduled)["a"])
        assert steps == expected
        engine.run()

    def test_short_prompts_do_not_push_out_a_run(self):
        """In half of the step it would never fit."""
        engine = engine_of(sees(whole=True), max_num_seqs=8, max_model_len=80)
        add(engine, "a", prompt_of(30), (0, "x", (12,)), (10, "y", (12,)))
        for i in range(5):
            engine.add(f"b{i}", prompt_of(8, i), max_tokens=1, **ENDLESS)
        first = engine.dispatch()
        assert scheduled_tokens(first) == {"a": 12, "b0": 4} and names(first) == ["x"]
        engine.run()

    def test_decoding_requests_pause_for_a_run_that_takes_a_whole_step(self):
        engine = engine_of(sees(whole=True), max_num_batched_tokens=8, num_blocks=60)
        engine.add("a", prompt_of(4), max_tokens=30, **ENDLESS)
        engine.add("b", prompt_of(4, 1), max_tokens=30, **ENDLESS)
        engine.dispatch()
        add(engine, "c", prompt_of(3), (0, "x", (8,)), (1, "y", (8,)))
        steps = [scheduled_tokens(engine.dispatch()) for _ in range(6)]
        # the text between the pictures runs beside those that decode
        assert steps[:5] == [
            {"c": 8},
            {"a": 1, "b": 1, "c": 1},
            {"c": 8},
            {"a": 1, "b": 1, "c": 2},
            {"a": 1, "b": 1, "c": 1},
        ]
        engine.run()

    def test_without_chunks_a_prompt_waits_for_all_of_its_pictures(self):
        engine = engine_of(sees(max_step_embeds=9), enable_chunked_prefill=False, max_num_batched_tokens=24)
        add(engine, "a", prompt_of(4), (2, "x", (5,)))
        add(engine, "b", prompt_of(4, 1), (1, "y", (2,)), (2, "z", (3,)))
        engine.add("c", prompt_of(3, 2), max_tokens=2, **ENDLESS)
        assert steps_of(engine)[:2] == [({"a": 9, "c": 3}, ["x"]), ({"a": 1, "c": 1, "b": 9}, ["y", "z"])]


class TestCache:
    def test_requests_of_a_step_with_one_picture_encode_it_once(self):
        engine = engine_of(sees())
        for name in "ab":
            add(engine, name, prompt_of(4), (1, "x", (4,)), (2, "x", (4,)))
        assert steps_of(engine)[0][1] == ["x"]
        stats = engine.scheduler.make_stats()
        assert (stats.mm_cache_queries, stats.mm_cache_hits, stats.mm_cache_usage) == (4, 3, 0.0)

    def test_a_picture_stays_until_its_pages_are_needed(self):
        engine = engine_of(sees(num_pages=4))
        encoded = []
        for i, name in enumerate(["x", "y", "x", "z", "y", "x"]):
            add(engine, f"r{i}", prompt_of(4, i), (2, name, (4,)))
            encoded += [each for _, names_ in steps_of(engine) for each in names_]
        assert encoded == ["x", "y", "z", "y", "x"]  # of x and y, y was held less lately

    def test_what_is_held_is_not_evicted(self):
        engine = engine_of(sees(num_pages=4), max_num_batched_tokens=4, depth=3)
        add(engine, "a", prompt_of(6), (2, "x", (5,)))
        engine.dispatch()
        add(engine, "b", prompt_of(6, 1), (1, "y", (5,)), priority=0)
        assert steps_of(engine)[1] == ({"a": 3, "b": 1}, [])

    def test_a_prefix_hit_inside_a_picture_that_is_gone_encodes_it_again(self):
        for whole in (False, True):
            engine = engine_of(sees(num_pages=3, whole=whole), enable_prefix_caching=True)
            add(engine, "a", prompt_of(6), (2, "x", (6,)))
            engine.run()
            add(engine, "other", prompt_of(6, 4), (0, "y", (6,)))
            engine.run()
            tokens, features = illustrated(prompt_of(6), (2, "x", (6,)))
            engine.add("b", tokens[:8], mm_features=features, max_tokens=1, **ENDLESS)
            scheduled = engine.dispatch()
            assert scheduled.new_requests[0].num_computed_tokens == 4, "a hit within the picture"
            assert names(scheduled) == ["x"]
            engine.run()

    def test_the_content_of_a_picture_decides_over_a_prefix_hit(self):
        engine = engine_of(sees(), enable_prefix_caching=True)
        hits = []
        for i, name in enumerate("xxy"):
            add(engine, f"r{i}", prompt_of(8), (2, name, (6,)))
            hits.append(engine.dispatch().new_requests[0].num_computed_tokens)
            engine.run()
        assert hits == [0, 12, 0]

    def test_preempted_and_aborted_requests_hold_nothing(self):
        engine = engine_of(sees(num_pages=4), max_num_batched_tokens=4)
        add(engine, "a", prompt_of(4), (1, "x", (6,)))
        engine.dispatch()
        assert engine.scheduler.make_stats().mm_cache_usage == 0.75
        engine.lose_everything()
        assert engine.scheduler.make_stats().mm_cache_usage == 0
        assert names(engine.dispatch()) == ["x"]
        engine.abort("a")
        assert engine.scheduler.make_stats().mm_cache_usage == 0
        add(engine, "b", prompt_of(4), (1, "x", (6,)))
        assert steps_of(engine)[0][1] == [], "it is encoded, or will be by a step in flight"

    def test_a_failed_step_is_forgotten(self):
        engine = engine_of(sees(), depth=3)
        add(engine, "a", prompt_of(4), (1, "x", (4,)))
        engine.dispatch()
        add(engine, "b", prompt_of(4, 1), (1, "x", (4,)), (2, "y", (4,)))
        second = engine.dispatch()
        assert names(second) == ["y"]
        engine.receive()
        engine.in_flight.clear()
        engine.runner.rows.clear()
        engine.runner.hears_removals_again = True
        engine.record(engine.scheduler.fail_requests(second, "the device failed"))
        cache = engine.scheduler.ranks[0].pictures.cache
        assert [each.key[:1] for each in cache.pictures] == [] and cache.usage == 0
        add(engine, "c", prompt_of(4), (1, "x", (4,)), (2, "y", (4,)))
        assert steps_of(engine)[0][1] == ["x", "y"]

    def test_what_a_request_saw_that_failed_is_encoded_anew(self):
        engine = engine_of(sees(), depth=2)
        for name in "ab":
            add(engine, name, prompt_of(9), (1, "x", (4,)), max_tokens=6)
        engine.dispatch()
        engine.record(engine.scheduler.fail_requests(["a"], "no finite numbers"))
        add(engine, "c", prompt_of(4, 2), (1, "x", (4,)))
        assert names(engine.dispatch()) == ["x"]
        engine.run()

    def test_embeddings_that_are_no_numbers_fail_their_requests_in_the_step_that_encodes_them(self):
        """Though the step computes only a part of their prompts, and gives them no token."""
        engine = engine_of(sees(), max_num_batched_tokens=8)
        add(engine, "a", prompt_of(9), (1, "x", (4,)))
        engine.add("b", prompt_of(3, 1), max_tokens=2, **ENDLESS)
        engine.dispatch()
        scheduled, output = engine.in_flight.pop()
        output.failed, output.corrupted = {"a": "its picture gave no finite numbers"}, ["a"]
        assert output.request_ids == ["b"]
        engine.record(engine.scheduler.update_from_output(scheduled, output))
        assert engine.ends["a"].error == "its picture gave no finite numbers"
        assert engine.scheduler.make_stats().num_corrupted_reqs == 1
        add(engine, "c", prompt_of(9), (1, "x", (4,)))
        assert names(engine.dispatch()) == ["x"]
        engine.run()

    @pytest.mark.parametrize("lose", ["reset_prefix_cache", "lose_content", "change_weights"])
    def test_content_is_lost_with_that_of_the_kv_cache(self, lose):
        engine = engine_of(sees())
        for request_id in "ab":
            add(engine, request_id, prompt_of(4), (1, "x", (4,)))
            assert steps_of(engine)[0][1] == ["x"]
            getattr(engine.scheduler, lose)(*["version", "label"] * (lose == "change_weights"))


class TestRefusals:
    def refusal(self, encoder: EncoderCacheConfig | None, *pictures, **options) -> str:
        engine = engine_of(encoder, **options)
        with pytest.raises(RequestError) as refused:
            add(engine, "a", prompt_of(4), *pictures)
        assert refused.value.parameter == "multi_modal_data"
        assert not engine.scheduler.requests
        return str(refused.value)

    def test_what_can_never_fit_is_refused_with_the_numbers(self):
        assert "1 pictures, but this engine sees none" in self.refusal(None, (1, "x", (4,)))
        wide = self.refusal(sees(max_step_embeds=5), (1, "x", (3,)), (2, "y", (6,)))
        assert "picture 1 of request 'a' has 6 embeddings" in wide and "max_num_encoder_input_tokens = 5" in wide
        assert "3 pages of 2" in self.refusal(sees(num_pages=3), (1, "x", (7,)))
        single = self.refusal(replace(sees(), largest=6), (1, "x", (6,)), (2, "y", (7,)))
        assert "picture 1 of request 'a' has 7 embeddings, and this engine was made for pictures of 6" in single
        whole = self.refusal(sees(whole=True), (1, "x", (9,)), max_num_batched_tokens=8)
        assert "9 tokens must be computed in one step, which holds max_num_batched_tokens = 8" in whole
        pictures = (1, "x", (4,)), (2, "y", (4,))
        assert "have 8 embeddings" in self.refusal(sees(max_step_embeds=7), *pictures, enable_chunked_prefill=False)

    def test_a_key_that_has_another_size_is_refused_alone(self):
        engine = engine_of(sees())
        add(engine, "a", prompt_of(4), (1, "x", (4,)))
        engine.dispatch()
        with pytest.raises(RequestError, match="has 5 embeddings, but under its key .* there is one of 4"):
            add(engine, "b", prompt_of(4), (1, "x", (5,)))
        with pytest.raises(RequestError, match="has 4 embeddings, but under its key .* there is one of 5"):
            add(engine, "b", prompt_of(4), (1, "y", (4,)), (2, "y", (5,)))
        engine.run()
        assert set(engine.ends) == {"a"}

    @pytest.mark.parametrize("change", [{"offset": 3}, {"runs": [(2, 2)]}, {"length": 20}, {"runs": [(2, 4), (4, 0)]}])
    def test_features_outside_the_prompt_are_refused(self, change):
        engine, feature = engine_of(sees()), picture("x", 2, 4)
        for name, value in change.items():
            setattr(feature, name, value)
        with pytest.raises(RequestError, match="does not fit its prompt of 9 tokens"):
            engine.add("a", prompt_of(9), mm_features=[feature])

    def test_attention_ranks_see_no_pictures(self):
        with pytest.raises(ConfigError, match="2 data-parallel ranks, which see no pictures. Give language_model_only"):
            engine_of(sees(), num_ranks=2)


ENCODERS = [sees(5, 2, 8), sees(5, 2, 8, whole=True), sees(9, 1, 9, whole=True), sees(3, 8, 40)]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
def test_crowds_with_pictures_get_the_right_answers(encoder, policy):
    """Few blocks and few pages, so that preemption and eviction are frequent. All finish; a run is never cut."""
    num_preemptions = num_hits = num_again = 0
    for seed in range(6):
        draw = random.Random(f"{seed} {encoder} {policy}")
        windows = draw.choice([(None,), (None, 6)])
        budget = draw.choice([9, 12, 24])
        engine = Engine(
            num_blocks=1 + needs_of(windows, 40, budget)[0] + draw.randint(0, 6),
            windows=windows,
            max_num_batched_tokens=budget,
            max_num_seqs=draw.choice([3, 6]),
            max_model_len=40,
            depth=1 + seed % 3,
            max_steps=draw.choice([1, 4]),
            most_drafts=3 if seed == 4 else 0,
            scheduling_policy=policy,
            long_prefill_token_threshold=draw.choice([0, 5]),
            enable_prefix_caching=seed != 5,
            encoder=encoder,
        )
        for i in range(30):
            length = draw.randint(2, 12)
            places = sorted(draw.choices(range(length), k=draw.choice([0, 1, 1, 2])))
            pictures = [
                (place, *draw.choice([("x", (5,)), ("y", (8,)), ("z", (3, 2, 1)), ("w", (8,))])) for place in places
            ]
            seed_ = draw.choice([0, 0, 1])
            options = {"max_tokens": draw.randint(1, 9), "priority": draw.randint(0, 2), "arrival_time": float(i)}
            add(engine, f"r{i}", prompt_of(length, seed_), *pictures, **options)
            for _ in range(draw.choice([0, 0, 1, 3])):
                engine.step()
            if draw.random() < 0.2 and engine.scheduler.requests:
                engine.abort(draw.choice(sorted(engine.scheduler.requests)))
        engine.run()
        stats = engine.scheduler.make_stats()
        num_preemptions += stats.num_preemptions
        num_hits += stats.mm_cache_hits
        num_again += engine.runner.num_encoded > 4
        assert stats.mm_cache_queries == stats.mm_cache_hits + engine.runner.num_encoded
        assert stats.mm_cache_usage == 0
    assert num_preemptions and num_hits and num_again, "the test is too easy"
