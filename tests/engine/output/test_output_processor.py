import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.engine.observability.metrics import EngineMetrics
from jaxpaged.engine.output.processor import OutputProcessor
from jaxpaged.errors import RequestError
from jaxpaged.messages import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
PROMPT = TOKENIZER.encode("the cat")


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def start(**params):
    """An output processor with one request "r"; returns it and what the engine is to compute."""
    processor = OutputProcessor(TOKENIZER, EngineMetrics(1000))
    params = SamplingParams(**{"max_tokens": 100, "seed": 7, **params})
    request = EngineCoreRequest("r", PROMPT, params, arrival_time=0.0, eos_token_id=2)
    return processor, processor.add_request(request, "the cat")


def feed(processor, token_ids, request_id="r", **fields):
    """One step's output for one request; returns (result or None, ids to abort)."""
    processed = processor.process([EngineCoreOutput(request_id, list(token_ids), **fields)])
    assert len(processed.request_outputs) <= 1
    return (processed.request_outputs or [None])[0], processed.ids_to_abort


def test_cumulative_outputs_repeat_everything():
    processor, _ = start()
    first, _ = feed(processor, ids_of(" sat"))
    last, _ = feed(processor, ids_of(" on"), finish_reason="length")
    assert (first.outputs[0].text, last.outputs[0].text) == (" sat", " sat on")
    assert last.outputs[0].token_ids == ids_of(" sat on")
    assert (first.finished, last.finished) == (False, True)
    assert (last.prompt, last.prompt_token_ids) == ("the cat", PROMPT)
    assert last.outputs[0].finish_reason == "length"
    assert last.outputs[0].finished()
    assert len(processor) == 0


def test_delta_outputs_add_up():
    processor, _ = start(output_kind=RequestOutputKind.DELTA, stop=["never this"])
    results = [feed(processor, [i])[0] for i in ids_of(" sat on the mat")]
    results.append(feed(processor, ids_of(" and"), finish_reason="length")[0])
    assert "".join(r.outputs[0].text for r in results) == " sat on the mat and"
    assert [i for r in results for i in r.outputs[0].token_ids] == ids_of(" sat on the mat and")


@pytest.mark.parametrize("asked", [{}, {"stop": ["never this"]}, {"logprobs": 0}, {"detokenize": False}])
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_tokens_come_in_intervals_but_the_first_and_the_last_at_once(kind, asked):
    processor, _ = start(output_kind=kind, stream_interval=3, **asked)
    ids = ids_of(" sat on the mat and the cat sat on the mat")
    assert len(ids) >= 8
    ids = ids[:8]
    results = []
    for number, token_id in enumerate(ids, 1):
        lines = [TokenLogprobs([token_id], [-1.0], 1)]
        end = "length" if number == len(ids) else None
        results.append(feed(processor, [token_id], new_logprobs=lines, finish_reason=end)[0])
    shown = [number for number, result in enumerate(results, 1) if result is not None]
    assert shown == [1, 4, 7, 8]
    parts = [result.outputs[0] for result in results if result is not None]
    if kind is RequestOutputKind.DELTA:
        assert [i for part in parts for i in part.token_ids] == ids
        assert "".join(part.text for part in parts) == ("" if asked == {"detokenize": False} else TOKENIZER.decode(ids))
        assert all(len(part.logprobs) == len(part.token_ids) for part in parts if "logprobs" in asked)
    else:
        assert [part.token_ids for part in parts] == [ids[:number] for number in shown]


def test_each_of_n_sequences_has_intervals_of_its_own():
    processor, _ = start(output_kind=RequestOutputKind.DELTA, stream_interval=2, n=2)
    token, shown = ids_of(" sat"), []
    for request_id in ("0_r", "1_r", "1_r", "0_r", "1_r", "0_r"):
        result, _ = feed(processor, token, request_id)
        shown.append(result and [(each.index, len(each.token_ids)) for each in result.outputs])
    assert shown == [[(0, 1)], [(1, 1)], None, None, [(1, 2)], [(0, 2)]]
    feed(processor, token, "0_r", finish_reason="length")
    assert processor.abort(["r"])[1][0].outputs[0].finish_reason == "abort"


def test_what_an_interval_holds_back_comes_with_an_abort_and_a_stop_string():
    processor, _ = start(output_kind=RequestOutputKind.DELTA, stream_interval=9)
    feed(processor, ids_of(" sat"))
    feed(processor, ids_of(" on"))
    assert processor.abort(["r"])[1][0].outputs[0].text == " on"
    processor, _ = start(output_kind=RequestOutputKind.DELTA, stream_interval=9, stop=["mat"])
    feed(processor, ids_of(" sat"))
    results = [feed(processor, [token_id])[0] for token_id in ids_of(" on the mat")]
    assert "".join(result.outputs[0].text for result in results if result is not None).endswith(" on the ")


def test_final_only_outputs_come_once():
    processor, _ = start(output_kind=RequestOutputKind.FINAL_ONLY)
    assert feed(processor, ids_of(" sat"))[0] is None
    assert feed(processor, ids_of(" on"), finish_reason="length")[0].outputs[0].text == " sat on"


def test_an_end_token_stays_in_the_ids_but_not_in_the_text():
    processor, _ = start(skip_special_tokens=False)
    result, aborts = feed(processor, [*ids_of(" sat"), 2], finish_reason="stop")
    assert result.outputs[0].text == " sat"
    assert result.outputs[0].token_ids[-1] == 2
    assert (result.outputs[0].stop_reason, aborts) == (None, [])


def test_a_stop_string_ends_the_sequence_and_tells_the_engine():
    processor, _ = start(stop=["at on"], logprobs=0)
    ids = ids_of(" sat on the mat")
    lines = [TokenLogprobs([i], [-1.0], 1) for i in ids]
    result, aborts = feed(processor, ids, new_logprobs=lines)
    assert aborts == ["r"]
    completion = result.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (" s", "stop", "at on")
    assert completion.token_ids == ids_of(" sat on")
    assert len(completion.logprobs) == len(completion.token_ids) == -completion.cumulative_logprob
    assert feed(processor, ids) == (None, []), "what the engine still sends is not looked at"


def test_a_stop_string_in_the_last_step_needs_no_abort():
    processor, _ = start(stop=["sat"])
    result, aborts = feed(processor, ids_of(" sat"), finish_reason="length")
    assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason, aborts) == ("stop", "sat", [])


def test_without_detokenising_there_are_ids_only():
    processor, _ = start(detokenize=False, logprobs=1)
    result, _ = feed(processor, [9], new_logprobs=[TokenLogprobs([9, 8], [-2.0, -1.0], 2)], finish_reason="stop")
    assert (result.outputs[0].text, result.outputs[0].token_ids) == ("", [9])
    assert result.outputs[0].logprobs[0][8].decoded_token is None


def test_an_error_is_told_in_the_result():
    processor, _ = start()
    feed(processor, ids_of(" sat"))
    result, _ = feed(processor, [], finish_reason="error", error="logits are not numbers")
    assert result.finished
    assert result.error == "logits are not numbers"
    assert (result.outputs[0].finish_reason, result.outputs[0].text) == ("error", " sat")


def test_logprobs_have_rank_and_text_and_the_sampled_token_first():
    processor, _ = start(logprobs=2)
    the, cat, on = ids_of(" the")[0], ids_of(" cat")[0], ids_of(" on")[0]
    result, _ = feed(
        processor,
        [the, on],
        new_logprobs=[
            TokenLogprobs([the, cat, on, 9], [-3.0, -0.5, -1.0, -4.0], 5),
            TokenLogprobs([on, cat, on, 9], [-1.0, -0.5, -1.0, -4.0], 2),
        ],
    )
    first, second = result.outputs[0].logprobs
    seen = [(i, p.rank, p.decoded_token) for i, p in first.items()]
    assert seen == [(the, 5, " the"), (cat, 1, " cat"), (on, 2, " on")]
    assert [(i, p.rank) for i, p in second.items()] == [(on, 2), (cat, 1)]
    assert result.outputs[0].cumulative_logprob == -4.0


def test_logprobs_of_chosen_tokens_have_no_rank():
    processor, _ = start(logprob_token_ids=[8, 9])
    result, _ = feed(processor, [7], new_logprobs=[TokenLogprobs([7, 8, 9], [-3.0, -0.5, -1.0], 5)])
    assert [p.rank for p in result.outputs[0].logprobs[0].values()] == [5, None, None]


def test_logprobs_of_characters_in_parts_show_the_character_once():
    processor, _ = start(logprobs=0)
    ids = ids_of("😀")
    result, _ = feed(processor, ids, new_logprobs=[TokenLogprobs([i], [-1.0], 1) for i in ids])
    pieces = [position[i].decoded_token for i, position in zip(ids, result.outputs[0].logprobs, strict=True)]
    assert pieces == ["", "", "", "😀"]


def test_prompt_logprobs_begin_with_none():
    processor, _ = start(prompt_logprobs=1)
    lines = [TokenLogprobs([i, 9], [-1.0, -0.1], 2) for i in PROMPT[1:]]
    result, _ = feed(processor, [9], prompt_logprobs=lines)
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(PROMPT)
    assert [list(position) for position in result.prompt_logprobs[1:]] == [[i, 9] for i in PROMPT[1:]]
    assert result.prompt_logprobs[1][PROMPT[1]].decoded_token == "the"
    assert feed(processor, [9])[0].prompt_logprobs is not None


def test_delta_outputs_have_prompt_logprobs_once():
    processor, _ = start(prompt_logprobs=0, output_kind=RequestOutputKind.DELTA)
    lines = [TokenLogprobs([i], [-1.0], 2) for i in PROMPT[1:]]
    assert feed(processor, [9], prompt_logprobs=lines)[0].prompt_logprobs is not None
    assert feed(processor, [9])[0].prompt_logprobs is None


def test_n_sequences_are_n_engine_requests_with_seeds_of_their_own():
    processor, children = start(n=3, prompt_logprobs=1)
    assert [c.request_id for c in children] == ["0_r", "1_r", "2_r"]
    assert [(c.sampling_params.n, c.sampling_params.seed) for c in children] == [(1, 7), (1, 8), (1, 9)]
    assert [c.sampling_params.prompt_logprobs for c in children] == [1, None, None]
    assert len(processor) == 1


def test_n_sequences_become_one_result_in_order():
    processor, _ = start(n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    assert feed(processor, ids_of(" on"), "1_r", finish_reason="length")[0] is None
    result, _ = feed(processor, [2], "0_r", finish_reason="stop", num_cached_tokens=3)
    assert result.finished
    assert [(o.index, o.text) for o in result.outputs] == [(0, ""), (1, " on")]
    assert result.num_cached_tokens == 3


def test_sequences_that_change_in_one_step_share_one_output():
    processor, _ = start(n=3)
    processed = processor.process([EngineCoreOutput("2_r", ids_of(" a")), EngineCoreOutput("0_r", ids_of(" b"))])
    [result] = processed.request_outputs
    assert [(o.index, o.text) for o in result.outputs] == [(0, " b"), (1, ""), (2, " a")]


def test_delta_outputs_of_n_sequences_hold_those_that_changed():
    processor, _ = start(n=3, output_kind=RequestOutputKind.DELTA)
    processed = processor.process([EngineCoreOutput("2_r", ids_of(" a")), EngineCoreOutput("0_r", ids_of(" b"))])
    [result] = processed.request_outputs
    assert [(o.index, o.text) for o in result.outputs] == [(0, " b"), (2, " a")]


def test_one_failed_sequence_of_n_does_not_end_the_others():
    processor, _ = start(n=2)
    result, _ = feed(processor, [], "0_r", finish_reason="error", error="no")
    assert not result.finished
    result, _ = feed(processor, ids_of(" a"), "1_r", finish_reason="length")
    assert (result.finished, result.error) == (True, "no")
    assert [o.finish_reason for o in result.outputs] == ["error", "length"]


def test_abort_returns_what_there_is_and_names_the_engine_requests():
    processor, _ = start(n=2)
    feed(processor, ids_of(" a"), "0_r", finish_reason="length")
    feed(processor, ids_of(" sat"), "1_r")
    engine_ids, results = processor.abort(["r", "unknown"])
    assert engine_ids == ["1_r"]
    assert [(o.text, o.finish_reason) for o in results[0].outputs] == [(" a", "length"), (" sat", "abort")]
    assert results[0].finished
    assert len(processor) == 0
    assert processor.abort(["r"]) == ([], [])


def test_an_id_can_be_used_again_only_when_it_is_free():
    processor, children = start()
    with pytest.raises(RequestError, match="id 'r' is under way"):
        processor.add_request(children[0], None)
    feed(processor, [9], finish_reason="stop")
    processor.add_request(children[0], None)


def test_times_and_counts_are_kept():
    processor, _ = start()
    first, _ = feed(processor, ids_of(" sat"), num_cached_tokens=2)
    assert first.metrics.first_token_time is not None
    assert first.metrics.finished_time is None
    last, _ = feed(processor, ids_of(" on"), finish_reason="length", num_preemptions=1)
    assert last.metrics.first_token_time == first.metrics.first_token_time <= last.metrics.finished_time
    assert last.metrics.num_preemptions == 1
    assert first.metrics.finished_time is None, "earlier results do not change"


class _NeverPlain(OutputProcessor):
    """The long way for every output: what the short one must equal."""

    def _advance(self, prompt, sequence, output, now):
        told = super()._advance(prompt, sequence, output, now)
        prompt.only_grows = False
        return told


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(RequestOutputKind),
    st.booleans(),
    st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 299), max_size=4))), max_size=8),
    st.sampled_from(["stop", "length", "error"]),
    st.sampled_from([{}, {"logprobs": 2}, {"stop": ["a", "th"], "detokenize": True}, {"stop": ["e "], "logprobs": 1}]),
)
def test_the_short_way_gives_what_the_long_one_gives(kind, detokenize, steps, reason, asked):
    def output(request_id, new, **fields):
        lines = [TokenLogprobs([token_id, 3, 4], [-0.5, -1.0, -2.0], 1) for token_id in new]
        return EngineCoreOutput(request_id, list(new), new_logprobs=lines, **fields)

    seen = []
    for make in (OutputProcessor, _NeverPlain):
        metrics = EngineMetrics(1000)
        processor = make(TOKENIZER, metrics)
        for request_id in "ab":
            options = {"detokenize": detokenize or "stop" in asked, **asked}
            params = SamplingParams(max_tokens=99, seed=7, output_kind=kind, **options)
            processor.add_request(EngineCoreRequest(request_id, PROMPT, params, 0.0, eos_token_id=2), None)
        given_out = [processor.process([output(i, new) for i, new in step]) for step in steps]
        last = [output(i, [5, 2], finish_reason=reason, num_preemptions=1) for i in "ab"]
        given_out.append(processor.process(last))
        results = [result for processed in given_out for result in processed.request_outputs]
        by_id = {i: [output for output in results if output.request_id == i] for i in "ab"}
        seen.append({i: summary(outputs, kind) for i, outputs in by_id.items()})
        seen[-1]["aborted"] = [processed.ids_to_abort for processed in given_out]
        seen[-1]["counts"] = metrics.generation_tokens, metrics.prompt_tokens, metrics.finished
        assert len(processor) == 0
    assert seen[0] == seen[1]


def summary(outputs, kind):
    """What a client has in the end, whatever was cut how."""
    texts, ids = [o.outputs[0].text for o in outputs], [o.outputs[0].token_ids for o in outputs]
    if kind == RequestOutputKind.DELTA:
        text, token_ids = "".join(texts), [i for part in ids for i in part]
        logprobs = [line for o in outputs for line in o.outputs[0].logprobs or ()]
    else:
        text, token_ids, logprobs = texts[-1], ids[-1], outputs[-1].outputs[0].logprobs or []
        assert all(text.startswith(earlier) for earlier in texts)
    last = outputs[-1]
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    ends = last.outputs[0].finish_reason, last.num_cached_tokens, last.metrics.num_preemptions, last.error
    ends = *ends, logprobs, last.outputs[0].cumulative_logprob, last.outputs[0].stop_reason
    return text, token_ids, ends, len(outputs) if kind == RequestOutputKind.FINAL_ONLY else None


def test_several_tokens_a_step_go_the_short_way_too():
    processor, _ = start(output_kind=RequestOutputKind.DELTA)
    ids = ids_of(" sat on the mat 😀 and the cat")
    results = [feed(processor, ids[i : i + 3])[0] for i in range(0, len(ids), 3)]
    results.append(feed(processor, [2], finish_reason="stop")[0])
    assert [r.outputs[0].token_ids for r in results[:-1]] == [ids[i : i + 3] for i in range(0, len(ids), 3)]
    assert "".join(r.outputs[0].text for r in results) == " sat on the mat 😀 and the cat"


def test_two_outputs_of_a_request_in_one_call_keep_their_order():
    processor, _ = start(output_kind=RequestOutputKind.DELTA)
    outputs = [EngineCoreOutput("r", ids_of(text)[:1]) for text in (" the", " cat", " sat")]
    results = processor.process(outputs).request_outputs
    results += processor.process(outputs).request_outputs
    assert [i for r in results for i in r.outputs[0].token_ids] == [o.new_token_ids[0] for o in outputs] * 2


def test_the_time_between_tokens_is_counted_once_per_sequence_and_step():
    metrics = EngineMetrics(1000)
    processor = OutputProcessor(TOKENIZER, metrics)
    for request_id in "abc":
        params = SamplingParams(max_tokens=99, seed=7)
        processor.add_request(EngineCoreRequest(request_id, PROMPT, params, 0.0, eos_token_id=2), None)
    for _ in range(4):
        processor.process([EngineCoreOutput(i, [9]) for i in "abc"])
    assert metrics.tallies["vllm:inter_token_latency_seconds"].read("").count == 9
    assert metrics.tallies["vllm:time_to_first_token_seconds"].read("").count == 3
    assert metrics.generation_tokens == 12


def test_a_sequence_that_stops_without_a_stop_token_keeps_its_last_text():
    """A grammar that allows nothing more ends an answer with a token of the answer."""
    processor, _ = start()
    last, _ = feed(processor, ids_of(" sat"), finish_reason="stop")
    assert (last.outputs[0].text, last.outputs[0].finish_reason) == (" sat", "stop")
