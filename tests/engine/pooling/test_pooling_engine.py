"""Pooling requests through input processor, scheduler and output processor, over a model that counts tokens."""

import numpy as np
import pytest

from jaxpaged import PoolingParams, SamplingParams
from jaxpaged.encoding.frames import FrameDecoder, FrameEncoder
from jaxpaged.errors import RequestError
from jaxpaged.messages import EngineCoreOutput
from tests.engine.fake_engine import make_engine, run_to_end
from tests.engine.fake_pooling import make_pooling_engine, normalized, vector_of


def pool(engine, prompts, params=None):
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params or PoolingParams())
    outputs = run_to_end(engine)
    assert all(len(each) == 1 and each[0].finished for each in outputs.values())
    return [outputs[str(i)][0] for i in range(len(prompts))]


def check_books(engine):
    scheduler = engine._core._scheduler
    scheduler.check_integrity()
    assert not scheduler.requests and scheduler.kv_cache_manager.usage == 0


def test_every_prompt_gives_its_vector_once_whatever_chunks_it_takes():
    engine, executor = make_pooling_engine()  # 16 tokens a step
    prompts = [[5] * 3, list(range(5, 55)), [7, 9], list(range(60, 90))]
    for output, prompt in zip(pool(engine, prompts), prompts):
        np.testing.assert_allclose(output.outputs.data, normalized(vector_of(prompt)), rtol=1e-6)
        assert output.prompt_token_ids == prompt and output.error is None
    assert max(scheduled.total_num_scheduled_tokens for scheduled in executor.executed) <= 16
    assert len(executor.executed) <= 7, "tokens were computed after the end of a prompt"
    check_books(engine)


def test_a_prompt_may_fill_the_context_and_one_token_more_is_refused():
    engine, _ = make_pooling_engine(max_model_len=32)
    [output] = pool(engine, [list(range(5, 37))])
    np.testing.assert_allclose(output.outputs.data, normalized(vector_of(range(5, 37))), rtol=1e-6)
    with pytest.raises(RequestError, match=r"33 tokens, but may have at most max_model_len = 32"):
        engine.add_request("long", list(range(5, 38)), PoolingParams())
    check_books(engine)


def test_a_prompt_that_was_asked_before_comes_from_the_prefix_cache():
    engine, executor = make_pooling_engine()
    prompt = list(range(5, 45))
    first, second = pool(engine, [prompt])[0], None
    num_steps = len(executor.executed)
    second = pool(engine, [prompt])[0]
    np.testing.assert_array_equal(first.outputs.data, second.outputs.data)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 36)
    assert len(executor.executed) == num_steps + 1


@pytest.mark.parametrize("pooling_type", ["MEAN", "CLS"])
def test_where_all_hidden_states_count_nothing_is_taken_from_the_prefix_cache(pooling_type):
    engine, _ = make_pooling_engine(pooler_config={"pooling_type": pooling_type})
    assert not engine.config.cache.enable_prefix_caching
    prompt = list(range(5, 45))
    assert [pool(engine, [prompt])[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_prompts_that_do_not_fit_the_cache_together_all_end():
    engine, _ = make_pooling_engine(num_blocks=14, block_size=4)
    prompts = [list(range(5 + i, 45 + i)) for i in range(6)]
    for output, prompt in zip(pool(engine, prompts), prompts):
        np.testing.assert_allclose(output.outputs.data, normalized(vector_of(prompt)), rtol=1e-6)
    check_books(engine)


def test_a_request_that_fails_is_alone_with_that():
    engine, executor = make_pooling_engine()
    executor.bad_requests["1"] = "its hidden states are not finite numbers"
    good, bad, other = pool(engine, [[5, 6], [7], [8, 9]])
    assert bad.error == executor.bad_requests["1"] and bad.outputs.data is None
    assert good.error is None and other.error is None
    check_books(engine)


def test_a_failed_step_is_an_error_of_its_requests_and_the_next_one_is_served():
    engine, executor = make_pooling_engine()
    executor.fail_at[0] = "result"
    assert "on fire" in pool(engine, [[5, 6]])[0].error
    assert pool(engine, [[5, 6]])[0].error is None


def test_an_aborted_request_says_so():
    engine, _ = make_pooling_engine()
    engine.add_request("x", [5] * 40, PoolingParams())
    engine.step()
    [output] = engine.abort_request("x")
    assert output.finished and "abort" in output.error
    assert not engine.has_unfinished_requests()


def test_each_kind_of_engine_refuses_the_others_requests():
    pooling, _ = make_pooling_engine()
    generating, _ = make_engine()
    with pytest.raises(RequestError, match="was started for pooling"):
        pooling.add_request("x", [5], SamplingParams())
    with pytest.raises(RequestError, match="was started for pooling"):
        pooling.add_request("x", [5])
    with pytest.raises(RequestError, match="was started to generate"):
        generating.add_request("x", [5], PoolingParams())


def test_truncation_keeps_the_first_tokens_and_those_that_the_tokenizer_adds():
    engine, _ = make_pooling_engine(max_model_len=16)
    text = "the cat sat on the mat " * 10
    whole = engine.get_tokenizer().encode(text)
    assert whole[0] == 1 and len(whole) > 16
    outputs = pool(engine, [text, whole], PoolingParams(truncate_prompt_tokens=5))
    assert [output.prompt_token_ids for output in outputs] == [whole[:5]] * 2
    assert len(pool(engine, [text], PoolingParams(truncate_prompt_tokens=-1))[0].prompt_token_ids) == 16
    with pytest.raises(RequestError, match=r"truncate_prompt_tokens is 17; it must be from 1 to max_model_len = 16"):
        engine.add_request("x", text, PoolingParams(truncate_prompt_tokens=17))


def test_prompts_are_counted():
    engine, _ = make_pooling_engine()
    pool(engine, [[5, 6, 7], [8]])
    assert engine.metrics.prompt_tokens == 4 and engine.metrics.generation_tokens == 0
    assert engine.metrics.finished["stop"] == 2


def test_a_vector_travels_between_processes():
    vector = np.linspace(-1, 1, 5, dtype=np.float32)
    frames = FrameEncoder().encode([EngineCoreOutput("a", [], finish_reason="stop", pooled=vector)])
    [output] = FrameDecoder(list[EngineCoreOutput]).decode([bytes(frame) for frame in frames])
    np.testing.assert_array_equal(output.pooled, vector)
    [plain] = FrameDecoder(list[EngineCoreOutput]).decode(FrameEncoder().encode([EngineCoreOutput("a", [1])]))
    assert plain.pooled is None
