import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.engine.observability.metrics import Counter, Gauge
from jaxpaged.errors import RequestError
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fake_engine import FakeExecutor, counting_model, make_engine, run_to_end, scripted_model
from tests.engine.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


def answering(text, prompt="the cat", **options):
    """An engine whose model answers `prompt` with `text` and the end token."""
    answer = [*TOKENIZER.encode(text, False), TOKENIZER.eos_token_id]
    model = scripted_model(TOKENIZER.vocab_size, answer, len(TOKENIZER.encode(prompt)))
    return make_engine(FakeExecutor(model, TOKENIZER.vocab_size), **options)[0]


def metric(engine, name, *labels):
    return next(m.value for m in engine.get_metrics() if m.name == name and tuple(m.labels.values()) == labels)


def test_text_goes_in_and_text_comes_out():
    engine = answering(" sat on the mat 😀")
    engine.add_request("r", "the cat", SamplingParams(temperature=0.0, max_tokens=None))
    outputs = run_to_end(engine)["r"]
    assert outputs[-1].outputs[0].text == " sat on the mat 😀"
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert outputs[-1].outputs[0].stop_reason is None
    assert all(" sat on the mat 😀".startswith(o.outputs[0].text) for o in outputs)
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_stop_string_ends_the_request_in_the_engine_too(asynchronous):
    engine = answering(" sat on the mat and the dog sat", async_scheduling=asynchronous)
    params = SamplingParams(temperature=0.0, max_tokens=50, stop=["the m", "dog"], output_kind=RequestOutputKind.DELTA)
    engine.add_request("r", "the cat", params)
    outputs = run_to_end(engine)["r"]
    assert "".join(o.outputs[0].text for o in outputs) == " sat on "
    assert outputs[-1].outputs[0].stop_reason == "the m"
    assert engine.step() == []
    assert metric(engine, "vllm:num_requests_running") == 0


def test_a_bad_request_is_refused_and_others_finish():
    engine, _ = make_engine()
    engine.add_request("good", "the cat", GREEDY)
    with pytest.raises(RequestError, match="token id 999"):
        engine.add_request("bad", [999], GREEDY)
    assert engine.get_num_unfinished_requests() == 1
    assert list(run_to_end(engine)) == ["good"]


def test_a_request_that_the_core_refuses_leaves_nothing_behind():
    engine, _ = make_engine(FakeExecutor(lambda ids: None, TOKENIZER.vocab_size, num_blocks=5))
    with pytest.raises(RequestError, match="KV blocks"):
        engine.add_request("big", [9] * 20, SamplingParams(max_tokens=20, n=3))
    assert not engine.has_unfinished_requests()


def test_a_failed_step_becomes_an_error_of_its_requests():
    engine, executor = make_engine()
    executor.fail_at[1] = "result"
    engine.add_request("r", "the cat", GREEDY)
    last = run_to_end(engine)["r"][-1]
    assert "the device is on fire" in last.error
    assert last.outputs[0].finish_reason == "error"
    engine.add_request("r", "the cat", GREEDY)
    assert run_to_end(engine)["r"][-1].error is None


def test_aborted_requests_return_what_they_had():
    engine, _ = make_engine()
    engine.add_request("a", [10], SamplingParams(temperature=0.0, max_tokens=20))
    engine.add_request("b", [20], GREEDY)
    engine.step()
    [output] = engine.abort_request("a")
    assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
    assert output.outputs[0].token_ids == [11]
    assert engine.abort_request(["a", "nobody"]) == []
    assert run_to_end(engine)["b"][-1].outputs[0].token_ids == [21, 22, 23, 24, 25]


def test_n_sequences_differ_and_repeat_with_the_seed():
    def draw(seed):
        engine, _ = make_engine()
        engine.add_request("r", "the cat", SamplingParams(n=4, max_tokens=6, seed=seed, temperature=1.5))
        return [o.token_ids for o in run_to_end(engine)["r"][-1].outputs]

    first = draw(3)
    assert len({tuple(ids) for ids in first}) == 4
    assert draw(3) == first
    assert draw(4)[:3] == first[1:], "sequence i is drawn with seed + i"


def test_runs_without_seeds_repeat_with_the_engines_seed():
    def draw(seed):
        engine, _ = make_engine(seed=seed)
        for name in "ab":
            engine.add_request(name, "the cat", SamplingParams(max_tokens=6, temperature=1.5))
        return [outputs[-1].outputs[0].token_ids for outputs in run_to_end(engine).values()]

    assert draw(1) == draw(1) != draw(2)
    assert draw(1)[0] != draw(1)[1]


def test_log_probabilities_come_with_ranks_and_text():
    engine, _ = make_engine(max_num_batched_tokens=8)
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=3, prompt_logprobs=2)
    engine.add_request("r", list(range(10, 30)), params)
    output = run_to_end(engine)["r"][-1]
    assert [len(p) for p in output.outputs[0].logprobs] == [3, 3]
    assert [next(iter(p)) for p in output.outputs[0].logprobs] == output.outputs[0].token_ids == [30, 31]
    assert output.outputs[0].cumulative_logprob == pytest.approx(2 * output.outputs[0].logprobs[0][30].logprob)
    assert output.prompt_logprobs[0] is None
    assert [next(iter(p)) for p in output.prompt_logprobs[1:]] == list(range(11, 30))
    assert all(p[i].rank == 1 and len(p) == 2 for i, p in enumerate(output.prompt_logprobs[1:], start=11))


def test_equal_beginnings_are_found_in_the_cache_and_counted():
    engine, _ = make_engine()
    for name in "ab":
        engine.add_request(name, list(range(10, 30)), GREEDY)
        output = run_to_end(engine)[name][-1]
    assert output.num_cached_tokens == 16
    assert metric(engine, "vllm:prefix_cache_hits") == 16
    assert engine.reset_prefix_cache() is True
    engine.add_request("c", list(range(10, 30)), GREEDY)
    assert run_to_end(engine)["c"][-1].num_cached_tokens == 0


def test_metrics_count_tokens_and_ends():
    engine, _ = make_engine()
    engine.add_request("r", [10, 11, 12], SamplingParams(temperature=0.0, max_tokens=5, n=1))
    run_to_end(engine)
    assert metric(engine, "vllm:prompt_tokens") == 3
    assert metric(engine, "vllm:generation_tokens") == 5
    assert metric(engine, "vllm:request_success", "length") == 1
    assert metric(engine, "jaxpaged:recompiles") == 0
    counts = {m.name: m.count for m in engine.get_metrics() if not isinstance(m, Counter | Gauge)}
    assert counts["vllm:time_to_first_token_seconds"] == 1
    assert counts["vllm:inter_token_latency_seconds"] == 4
    assert counts["vllm:iteration_tokens_total"] == 5
    assert {counts[f"vllm:request_{name}_time_seconds"] for name in ("queue", "prefill", "decode", "inference")} == {1}


def test_preempted_requests_get_the_same_text_and_are_counted():
    alone, _ = make_engine()
    alone.add_request("r", [10] * 9, SamplingParams(temperature=1.3, max_tokens=20, seed=5))
    expected = run_to_end(alone)["r"][-1].outputs[0].token_ids
    crowded, _ = make_engine(FakeExecutor(counting_model(TOKENIZER.vocab_size), TOKENIZER.vocab_size, num_blocks=16))
    for i in range(4):
        crowded.add_request(f"{i}", [10] * 9, SamplingParams(temperature=1.3, max_tokens=20, seed=5))
    outputs = [outputs[-1] for outputs in run_to_end(crowded).values()]
    assert [o.outputs[0].token_ids for o in outputs] == [expected] * 4
    assert sum(o.metrics.num_preemptions for o in outputs) == metric(crowded, "vllm:num_preemptions") > 0


def test_the_engine_shuts_down_with_its_block():
    engine, executor = make_engine()
    with engine:
        assert executor.running
    assert not executor.running


def test_priority_lets_a_request_overtake():
    engine, executor = make_engine(scheduling_policy="priority", max_num_seqs=1)
    engine.add_request("late", [10], GREEDY, priority=5)
    engine.add_request("soon", {"prompt_token_ids": [20], "priority": -1}, GREEDY)
    run_to_end(engine)
    assert executor.executed[0].request_ids == ["soon"]


requests = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(5, 60), min_size=1, max_size=20),
            "n": st.integers(1, 3),
            "seed": st.integers(0, 3),
            "max_tokens": st.integers(1, 15),
            "min_tokens": st.sampled_from([0, 1]),
            "stop": st.sampled_from([[], ["a"], ["at", " s"], ["q", "7"]]),
            "stop_token_ids": st.lists(st.integers(5, 299), max_size=3),
            "logprobs": st.sampled_from([None, 0, 2]),
            "prompt_logprobs": st.sampled_from([None, None, 1]),
            "output_kind": st.sampled_from(list(RequestOutputKind)),
            "arrives": st.integers(0, 10),
        }
    ),
    min_size=1,
    max_size=6,
)


def start(engine, name, request):
    params = {k: v for k, v in request.items() if k not in ("prompt", "arrives")}
    engine.add_request(name, request["prompt"], SamplingParams(temperature=1.2, **params))


def joined(outputs):
    """What a sequence of outputs says in the end, whatever their kind: per sequence, text, ids, logprobs, reason."""
    whole = {}
    for output in outputs:
        for c in output.outputs:
            text, ids, logprobs = whole.get(c.index, ("", [], []))[:3]
            more = c.logprobs or []
            if output.request_id.endswith("delta"):
                text, ids, logprobs = text + c.text, ids + c.token_ids, logprobs + more
            else:
                text, ids, logprobs = c.text, c.token_ids, more
            whole[c.index] = (text, ids, logprobs, c.finish_reason, c.stop_reason)
    prompt_logprobs = next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None)
    return whole, prompt_logprobs


def name_of(i, request):
    return f"{i} delta" if request["output_kind"] == RequestOutputKind.DELTA else f"{i}"


@given(
    requests,
    st.booleans(),
    st.sampled_from([4, 16]),
    st.sampled_from([10, 12, 64]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2, 7, None]),
)
def test_results_depend_on_nothing_but_the_request(
    batch, asynchronous, step_size, num_blocks, caching, aborts, num_steps
):
    model = counting_model(TOKENIZER.vocab_size)
    alone, _ = make_engine(FakeExecutor(model, TOKENIZER.vocab_size), num_scheduler_steps=1)
    expected = {}
    for i, request in enumerate(batch):
        start(alone, name_of(i, request), request)
        expected |= run_to_end(alone)
    crowd, _ = make_engine(
        FakeExecutor(model, TOKENIZER.vocab_size, num_blocks),
        async_scheduling=asynchronous,
        max_num_batched_tokens=step_size,
        max_num_seqs=4,
        enable_prefix_caching=caching,
        num_scheduler_steps=num_steps,
    )
    seen = {}
    for step in range(600):
        for i, request in enumerate(batch):
            if request["arrives"] == step:
                start(crowd, name_of(i, request), request)
                start(crowd, f"abort {i}", request)
        if aborts and step == 8:
            crowd.abort_request([f"abort {i}" for i in range(len(batch))])
        for output in crowd.step():
            seen.setdefault(output.request_id, []).append(output)
    assert not crowd.has_unfinished_requests()
    for name, outputs in expected.items():
        assert joined(seen[name]) == joined(outputs)
        assert [o.finished for o in seen[name]] == [False] * (len(seen[name]) - 1) + [True]
    assert crowd.reset_prefix_cache() is True, "every block was given back"
