"""Engines that share chunks under LMCache's names give the same text with as without, and refuse what they cannot."""

import json
from contextlib import closing

import pytest

from jaxpaged import LLM
from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.lmcache.keys import ChunkHasher, chunk_name
from tests.end_to_end.test_kv_offload import OPTIONS, PROMPTS, answers, worker_of
from tests.kv_store.lmcache.fake_server import FakeServer

STORY = "Once upon a time there was a small engine that could. "
TURNS = [STORY * 2 + "It went " * 30, STORY * 2 + "It stayed " * 30, STORY * 3 + "Then it rained. " * 12]


@pytest.fixture
def server():
    with closing(FakeServer()) as server:
        yield server


def names_of(llm, prompts, size):
    """The names of all full chunks of some prompts."""
    hasher, names = ChunkHasher(), set()
    for prompt in prompts:
        tokens, parent = llm.get_tokenizer().encode(prompt), ChunkHasher().root
        for start in range(0, len(tokens) - size + 1, size):
            parent = hasher.hash(parent, tokens[start : start + size])
            names.add(chunk_name("org/model", 1, 0, parent, "bfloat16"))
    return names


def load_of(llm):
    return worker_of(llm).stats()["kv_offload_tier_lmcache"]


@pytest.mark.slow
def test_the_next_engine_reads_what_the_first_one_wrote(server):
    llm = LLM(**OPTIONS)
    prompts = [*PROMPTS, *TURNS]
    expected, _ = answers(llm, prompts)
    names = names_of(llm, prompts, 64)
    llm.shutdown()
    wish = f"lmcache={server.url}?chunk_size=64&model=org/model"
    for more in ("", "host=64M,"):
        server.chunks.clear()
        llm = LLM(**OPTIONS, kv_offload=more + wish)
        assert answers(llm, prompts)[0] == expected and worker_of(llm).stats()["recompiles"] == 0
        llm.shutdown()
        assert load_of(llm)["stored"] == len(server.chunks) and len(names) > 6
        assert names <= set(server.chunks), (len(names), len(names & set(server.chunks)), len(server.chunks))
        llm = LLM(**{**OPTIONS, "block_size": 32}, kv_offload=wish)
        again, cached = answers(llm, prompts)
        assert again == expected and max(cached) >= 128 and cached[0] >= 64, cached
        assert worker_of(llm).stats()["kv_offload_pages_lost"] == 0 and load_of(llm)["corrupt"] == 0
        llm.shutdown()


@pytest.mark.slow
def test_chunks_of_lmcaches_own_size_are_stored_though_windows_are_shorter_and_that_is_said(server, caplog):
    llm = LLM(**OPTIONS, kv_offload=f"lmcache={server.url}?model=org/model")
    assert "LMCache's chunks have 256 tokens, and some layers of this model see" in caplog.text
    prompt = {"prompt_token_ids": [100 + 7 * i % 900 for i in range(480)]}
    expected, _ = answers(llm, [prompt])
    llm.shutdown()
    assert len(server.chunks) == 1
    llm = LLM(**OPTIONS, kv_offload=f"lmcache={server.url}?model=org/model")
    again, cached = answers(llm, [prompt])
    llm.shutdown()
    assert again == expected and cached == [256]


@pytest.mark.slow
def test_salted_prompts_are_neither_written_nor_read(server):
    llm = LLM(**OPTIONS, kv_offload=f"lmcache={server.url}?chunk_size=64")
    prompts = [{"prompt": PROMPTS[0], "cache_salt": salt} for salt in ("mine", "theirs")]
    answers(llm, prompts)
    assert not server.commands
    answers(llm, PROMPTS[:1])
    llm.shutdown()
    assert server.chunks


@pytest.mark.parametrize(
    ("wish", "options", "said"),
    [
        ("?chunk_size=40", {}, "chunk_size is 40 tokens, and blocks have 16"),
        ("?world_size=3", {}, "world_size is 3"),
        ("?model=a@b", {}, "the setting model"),
        (",pages=int8", {}, "as they are cached"),
    ],
)
def test_models_that_lmcache_lays_out_otherwise_are_refused(wish, options, said):
    with pytest.raises(ConfigError, match=said):
        LLM(**OPTIONS, **options, kv_offload=f"lmcache=lm://127.0.0.1:1{wish}")


def test_chunks_cannot_be_signed(tmp_path):
    path = tmp_path / "secrets.json"
    path.write_text(json.dumps({"page_secret": "sixteen letters."}), encoding="utf-8")
    with pytest.raises(ConfigError, match="LMCache's chunks cannot be signed"):
        LLM(**OPTIONS, kv_offload="lmcache=lm://127.0.0.1:1", kv_offload_secrets=str(path))
