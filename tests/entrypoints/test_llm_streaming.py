"""`LLM.stream`, `enqueue` and `wait_for_completion`: requests of several readers in one thread."""

import asyncio
import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.entrypoints.llm import LLM
from jaxpaged.errors import ConflictError, EngineError, RequestError
from jaxpaged.messages import RequestOutput
from jaxpaged.pooling import PoolingRequestOutput
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fake_engine import make_engine

MESSAGES = [{"role": "user", "content": "the cat"}]


def make(**options):
    engine, executor = make_engine(**options)
    return LLM.from_engine(engine), executor


def params(count=5, **fields):
    return SamplingParams(temperature=0.0, max_tokens=count, **fields)


def is_idle(llm):
    return not llm.llm_engine.has_unfinished_requests()


def test_chunks_join_to_what_generate_gives():
    llm, _ = make()
    for prompt in ("the cat", [10, 11], {"prompt_token_ids": [20]}, {"prompt": "sat"}, ["the dog"]):
        [whole] = llm.generate(prompt, params(9, logprobs=2))
        chunks = list(llm.stream(prompt, params(9, logprobs=2)))
        [answer] = whole.outputs
        assert "".join(chunk.text for chunk in chunks) == answer.text
        assert [token for chunk in chunks for token in chunk.token_ids] == answer.token_ids
        assert [line for chunk in chunks for line in chunk.logprobs] == answer.logprobs
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert len(chunks) > 1


def test_messages_are_answered_as_chat_does():
    llm, _ = make()
    options = {"add_generation_prompt": False, "chat_template": "{{ messages[0]['content'] }} sat"}
    for given_options in ({}, options):
        [whole] = llm.chat(MESSAGES, params(), **given_options)
        text = "".join(chunk.text for chunk in llm.stream(MESSAGES, params(), **given_options))
        assert text == whole.outputs[0].text


def test_parameters_stay_as_the_caller_made_them_and_may_be_left_out():
    llm, _ = make()
    given_params = params()
    list(llm.stream("a", given_params))
    assert given_params.output_kind == RequestOutputKind.CUMULATIVE
    assert sum(len(chunk.token_ids) for chunk in llm.stream("a")) == 16


def test_sequences_of_a_prompt_are_told_apart_by_index():
    llm, _ = make()
    chunks = list(llm.stream([10], SamplingParams(n=3, seed=1, max_tokens=4)))
    [whole] = llm.generate([10], SamplingParams(n=3, seed=1, max_tokens=4))
    for answer in whole.outputs:
        assert [t for c in chunks if c.index == answer.index for t in c.token_ids] == answer.token_ids


def test_leaving_the_loop_aborts_the_request():
    llm, executor = make()
    for chunk in llm.stream([10], params(40)):
        assert chunk.token_ids
        break
    del chunk
    assert is_idle(llm)
    assert [output.outputs[0].token_ids for output in llm.generate([[20]], params(3))] == [[21, 22, 23]]
    assert executor.rows.keys() <= {"1"}


def test_an_error_inside_the_loop_aborts_the_request():
    llm, _ = make()

    def broken():
        for chunk in llm.stream([10], params(40)):
            raise ZeroDivisionError(chunk.text)

    with pytest.raises(ZeroDivisionError):
        broken()
    gc.collect()
    assert is_idle(llm)


def test_a_stream_that_nobody_begins_asks_for_nothing():
    llm, executor = make()
    llm.stream([10], params())
    assert is_idle(llm)
    assert executor.executed == []


def test_a_stream_that_the_collector_closes_during_a_step_is_aborted_by_the_next(monkeypatch):
    llm, executor = make()
    stream = llm.stream([10], params(40))
    next(stream)
    execute = executor.execute_model

    def collecting(scheduled):
        stream.close()  # as the garbage collector does, at any time
        return execute(scheduled)

    monkeypatch.setattr(executor, "execute_model", collecting)
    assert llm.generate([[20]], params(3))[0].outputs[0].token_ids == [21, 22, 23]
    monkeypatch.undo()
    assert is_idle(llm)


def test_a_batch_inside_the_loop_loses_nothing_of_the_stream():
    llm, _ = make()
    tokens = []
    for chunk in llm.stream([10], params(6)):
        tokens += chunk.token_ids
        assert llm.generate([[30], [40]], params(2))[1].outputs[0].token_ids == [41, 42]
    assert tokens == [11, 12, 13, 14, 15, 16]


def test_streams_run_side_by_side():
    llm, _ = make()
    both = zip(llm.stream([10], params(30)), llm.stream([100], params(30)), strict=False)
    first, second = next(both)
    assert (first.token_ids[0], second.token_ids[0]) == (11, 101)
    del both
    gc.collect()
    assert is_idle(llm)


def test_it_runs_inside_an_event_loop():
    llm, _ = make()

    async def notebook():
        return [token_id for chunk in llm.stream([10], params(2)) for token_id in chunk.token_ids]

    assert asyncio.run(notebook()) == [11, 12]


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        (["a", "b"], {}, "there are 2 prompts, and one is taken here"),
        ("", {}, "the prompt is empty"),
        (None, {}, "must be a prompt"),
        ("a", {"tools": []}, "tools is for chats, and the prompt is none"),
        (MESSAGES, {"chat_template": "{% if %}"}, "not valid Jinja"),
    ],
)
def test_what_cannot_be_streamed_is_refused(prompt, options, said):
    llm, _ = make()
    with pytest.raises(RequestError, match=said):
        next(llm.stream(prompt, params(), **options))
    assert is_idle(llm)


def test_a_request_that_fails_raises():
    llm, executor = make()
    executor.bad_requests["0"] = "logits are not numbers"
    with pytest.raises(EngineError, match="logits are not numbers"):
        list(llm.stream([10], params()))
    assert is_idle(llm)


def test_a_sleeping_engine_gives_no_chunk_and_does_not_hang():
    llm, _ = make()
    stream = llm.stream([10], params(30))
    next(stream)
    llm.sleep(mode="keep")
    with pytest.raises(ConflictError, match="wake_up"):
        list(stream)
    llm.wake_up()
    assert is_idle(llm)


# ---- enqueue


def test_what_was_enqueued_is_completed_later_in_its_order():
    llm, executor = make()
    ids = llm.enqueue([[10], [20]], [params(9), params(2)])
    ids += llm.enqueue("the cat", params(1))
    assert len(set(ids)) == 3
    assert executor.executed == []
    outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 1]
    assert llm.wait_for_completion() == []


def test_a_batch_in_between_keeps_the_results_of_what_was_enqueued():
    llm, _ = make()
    llm.enqueue([[10], [20]], params(2))
    assert llm.generate([30], params(20))[0].outputs[0].token_ids[:2] == [31, 32]
    assert [output.outputs[0].token_ids for output in llm.wait_for_completion()] == [[11, 12], [21, 22]]


def test_results_of_another_type_are_an_error():
    llm, _ = make()
    llm.enqueue("a", params())
    with pytest.raises(TypeError, match="a result is a RequestOutput, not a PoolingRequestOutput"):
        llm.wait_for_completion(PoolingRequestOutput)


def test_a_bad_prompt_enqueues_nothing():
    llm, _ = make()
    with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
        llm.enqueue(["a", ""], params())
    assert llm.wait_for_completion() == []
    assert is_idle(llm)


def test_what_was_enqueued_outlives_a_sleep():
    llm, _ = make()
    llm.enqueue([[10]], params(2))
    llm.sleep(mode="keep")
    with pytest.raises(ConflictError, match="wake_up"):
        llm.wait_for_completion()
    llm.wake_up()
    assert llm.wait_for_completion()[0].outputs[0].token_ids == [11, 12]


@given(st.lists(st.sampled_from(["open", "next", "close", "enqueue", "wait", "generate"]), max_size=25))
def test_any_order_of_calls_gives_every_reader_its_own_tokens(calls):
    llm, _ = make(max_num_seqs=3)
    streams, enqueued, start = {}, [], 10
    for call in calls:
        start += 10
        if call == "open":
            streams[start] = (llm.stream([start], params(7)), [])
        elif call == "enqueue":
            enqueued += [start] if llm.enqueue([[start]], params(3)) else []
        elif call == "wait":
            outputs = llm.wait_for_completion()
            assert [o.outputs[0].token_ids for o in outputs] == [[s + 1, s + 2, s + 3] for s in enqueued]
            enqueued = []
        elif call == "generate":
            assert llm.generate([start], params(2))[0].outputs[0].token_ids == [start + 1, start + 2]
        elif streams:
            first = next(iter(streams))
            stream, tokens = streams[first]
            chunk = next(stream, None) if call == "next" else stream.close()
            tokens += chunk.token_ids if chunk else []
            expected = [first + 1 + i for i in range(7)]
            assert tokens == expected[: len(tokens)]
            if chunk is None:
                assert call == "close" or tokens == expected
                del streams[first], stream
    for stream, _ in streams.values():
        stream.close()
    llm.wait_for_completion()
    assert is_idle(llm)
