"""Engines that share chunks through LMCache's multi-process server give the same text with as without, whatever becomes
of the server, and refuse what they cannot."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.lmcache.multiprocess.pool import FOLDER
from tests.end_to_end.test_kv_offload import OPTIONS as DEMO
from tests.end_to_end.test_kv_offload import worker_of
from tests.kv_store.lmcache.fake_multiprocess import FakeMultiprocessServer
from tests.models.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not Path(FOLDER).is_dir(), reason=f"there is no {FOLDER} to share memory in")
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "block_size": 8,
    "max_num_seqs": 4,
    "token_buckets": (8, 64),
    "num_gpu_blocks_override": 60,
    "num_scheduler_steps": 1,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """All of its layers cache alike."""
    return str(write_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture
def server():
    with closing(FakeMultiprocessServer(chunk_size=32, capacity=8 << 20)) as server:
        yield server


def prompts():
    """Some with a beginning in common, which ends within a chunk."""
    rng = np.random.default_rng(3)
    begin = rng.integers(1, 90, 41).tolist()
    return [begin + rng.integers(1, 90, size).tolist() for size in (20, 7, 52)] + [rng.integers(1, 90, 33).tolist()]


def through(server, **extra):
    """vLLM's JSON."""
    extra = {
        "lmcache.mp.host": "grpc://127.0.0.1",
        "lmcache.mp.port": server.port,
        "lmcache.mp.model": "org/m",
        **extra,
    }
    return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def answers(llm):
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    results = llm.generate(asked, GREEDY, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results], [result.num_cached_tokens for result in results]


@pytest.mark.slow
def test_the_next_engine_reads_what_the_first_one_wrote(model, server):
    llm = LLM(model=model, **OPTIONS)
    expected, _ = answers(llm)
    llm.shutdown()
    for offload in (None, "host=8M"):
        llm = LLM(model=model, **OPTIONS, kv_offload=offload, kv_transfer_config=through(server))
        assert answers(llm)[0] == expected and worker_of(llm).stats()["recompiles"] == 0
        llm.shutdown()
        assert worker_of(llm).stats()["kv_offload_tier_lmcache"]["errors"] == 0
        assert {tuple(prompt[:32]) for prompt in prompts()} <= {name[3] for name in server.objects}
    llm = LLM(model=model, **{**OPTIONS, "block_size": 16}, kv_transfer_config=through(server))
    again, cached = answers(llm)
    assert again == expected and max(cached) >= 64, cached
    assert worker_of(llm).stats()["kv_offload_pages_lost"] == 0
    assert server.calls["GetChunkSize"] == 2 * 3, "each engine asks before its weights are read, and when it is known"
    server.close()
    assert llm.reset_prefix_cache() and answers(llm)[0] == expected, "without the server"
    llm.shutdown()


@pytest.mark.slow
def test_an_engine_starts_without_the_server(model, server, caplog):
    server.close()
    llm = LLM(model=model, **OPTIONS, kv_offload=f"lmcache={server.url}?chunk_size=32")
    assert len(answers(llm)[0]) == 4
    llm.shutdown()
    assert "The engine starts without it, for chunks of 32 tokens" in caplog.text


def test_what_cannot_be_shared_is_refused_before_weights_are_read(model, server):
    with pytest.raises(ConfigError, match="groups of layers, which vLLM's connector"):
        LLM(**DEMO, kv_transfer_config=through(server))
    server.chunk_size = 20
    with pytest.raises(ConfigError, match="chunk_size is 20 tokens, and blocks have 8"):
        LLM(model=model, **OPTIONS, kv_transfer_config=through(server))
    server.chunk_size = 1 << 40
    with pytest.raises(ConfigError, match="a chunk has 1099511627776 tokens"):
        LLM(model=model, **OPTIONS, kv_transfer_config=through(server))


@pytest.mark.slow
def test_a_server_without_shared_memory_is_refused(model, server):
    server.name, server.capacity = "", 0
    with pytest.raises(ConfigError, match="it would send pickles.*--shm-name NAME"):
        LLM(model=model, **OPTIONS, kv_transfer_config=through(server))
