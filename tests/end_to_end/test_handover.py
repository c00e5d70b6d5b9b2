"""One engine computes a prompt and another goes on: the same text, whatever happens to the first one."""

import msgspec
import pytest

from jaxpaged import LLM
from tests.end_to_end.test_kv_offload import GREEDY, OPTIONS, PROMPTS, answers, worker_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair():
    producer, consumer = LLM(**OPTIONS, kv_role="kv_producer"), LLM(**OPTIONS, kv_role="kv_consumer")
    yield producer, consumer
    producer.shutdown()
    consumer.shutdown()


def ask(llm, prompt, max_tokens=8, **transfer):
    params = msgspec.structs.replace(GREEDY, max_tokens=max_tokens, extra_args={"kv_transfer_params": transfer})
    (result,) = llm.generate([prompt], params, use_tqdm=False)
    return result


def test_a_prompt_is_handed_over(pair):
    producer, consumer = pair
    expected, _ = answers(producer, PROMPTS)
    for prompt, tokens in zip(PROMPTS, expected):
        said = ask(producer, prompt, 1, do_remote_decode=True).kv_transfer_params
        result = ask(consumer, prompt, **said)
        assert result.outputs[0].token_ids == tokens and result.kv_transfer_params is None
        assert result.num_cached_tokens >= said["remote_num_tokens"] - 16 > 60
    assert worker_of(consumer).stats()["kv_offload_tier_p2p"]["hits"] > 0
    assert worker_of(producer).stats()["recompiles"] == worker_of(consumer).stats()["recompiles"] == 0
    said = ask(producer, "Short.", 1, do_remote_decode=True).kv_transfer_params
    assert said is None, "less than a block is not worth a lease"
