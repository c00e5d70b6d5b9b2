"""The folder of a GGUF file is made once, is that of the file as it is, and serves like any model's."""

import json
import os
import shutil

import jax
import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.engine.input.chat_template import load_chat_templates
from jaxpaged.engine.input.tokenizer import load_tokenizer
from jaxpaged.entrypoints.cli import main
from jaxpaged.errors import CheckpointError
from jaxpaged.params.checkpoint import entries_of_folder
from jaxpaged.params.gguf_folder.folder import make_folder
from jaxpaged.params.hub import EMBEDDED_FOLDER, resolve_model_folder
from tests.params.formats.gguf.writer import write_gguf
from tests.params.gguf_folder.gguf_checkpoints import (
    config_of,
    facts_of,
    tensors_of,
    tensors_of_checkpoint,
    write_demo,
    write_gguf_checkpoint,
)
from tests.params.test_orbax_format import load

YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 2.0,
    "llama.rope.scaling.attn_factor": 0.5,
}
TEXT = "The quick brown fox, 42 times:\n\n  jumps!"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return make_folder(write_demo(folder / "demo.gguf"), folder / "cache")


def test_tokens_and_templates_are_the_model_s(demo):
    ours, theirs = load_tokenizer(demo), load_tokenizer(EMBEDDED_FOLDER)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.encode("<start_of_turn>user\nhello<end_of_turn>") == theirs.encode(
        "<start_of_turn>user\nhello<end_of_turn>"
    )
    assert ours.decode(ours.encode(TEXT)) == TEXT
    assert ours.special_ids == theirs.special_ids and ours.named_tokens == theirs.named_tokens
    assert load_chat_templates(demo, ours.config).sources == load_chat_templates(EMBEDDED_FOLDER, theirs.config).sources
    assert json.loads((demo / "generation_config.json").read_text())["eos_token_id"] == [1, 4]


def test_an_engine_generates_what_it_does_with_the_checkpoint(demo):
    greedy = SamplingParams(temperature=0, max_tokens=12)
    options = {"max_model_len": 64, "max_num_seqs": 1, "num_gpu_blocks_override": 16}
    engines = [LLM(str(folder), **options) for folder in (demo, EMBEDDED_FOLDER)]
    texts = [engine.generate("Once upon a time", greedy)[0].outputs[0].text for engine in engines]
    assert texts[0] == texts[1]


def test_a_converted_file_is_a_model_of_its_own(demo, tmp_path):
    assert main(["convert", str(demo), "-o", str(tmp_path / "out")]) == 0
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert "places.json" not in files and "tokenizer.json" in files
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    found, expected = (load(folder, dtype="bfloat16")[2] for folder in (tmp_path / "out", EMBEDDED_FOLDER))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_file_is_a_model_s_name_and_so_is_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_gguf_checkpoint("llama", tmp_path / "llama.gguf")
    folder = resolve_model_folder(str(path))
    assert folder.is_relative_to(tmp_path / "cache")
    assert resolve_model_folder(str(tmp_path)) == folder
    shutil.copy(path, tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match="holds 2 models in GGUF format .llama.gguf, other.gguf"):
        resolve_model_folder(str(tmp_path))


def test_another_file_has_another_folder(tmp_path):
    path = write_gguf_checkpoint("llama", tmp_path / "a.gguf")
    first = make_folder(path, tmp_path / "cache")
    assert make_folder(path, tmp_path / "cache") == first
    os.utime(path, ns=(1, 1))
    assert make_folder(path, tmp_path / "cache") != first


def test_a_file_that_was_taken_away_is_missed(tmp_path):
    path = write_gguf_checkpoint("llama", tmp_path / "a.gguf")
    folder = make_folder(path, tmp_path / "cache")
    path.unlink()
    with pytest.raises(CheckpointError, match="a.gguf is gone"):
        entries_of_folder(folder)


def test_a_cache_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(CheckpointError, match="cache cannot be written"):
        make_folder(write_gguf_checkpoint("llama", tmp_path / "a.gguf"), tmp_path / "cache")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"general.architecture": "mamba"}, "the architecture 'mamba'. Of GGUF files these are read: llama, qwen2"),
        ({"general.architecture": "clip", "general.type": "mmproj"}, "a mmproj of the architecture 'clip'"),
        ({"llama.block_count": "two"}, "llama.block_count is 'two'; it must be a whole number"),
        ({"llama.attention.head_count_kv": [4, 2]}, r"head_count_kv is \[2, 4\], another number in different layers"),
        ({"llama.attention.value_length": 64}, "keys and values have other sizes"),
        ({"llama.attention.surprise": 3}, "llama.attention.surprise is 3. Nothing is known of it"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False. Nothing is known"),
        ({"llama.attention.surprise": [1]}, r"surprise is \[1\]. Nothing is known"),
        (YARN, "attn_factor is 0.5; it must be 1 beside yarn"),
        ({"llama.rope.scaling.type": "spiral"}, "stretched by 'spiral'"),
        ({"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.model": "plamo2"}, "a tokenizer of the kind 'plamo2'"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.model": "gpt2"}, "has the token 'a' twice"),
        ({"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [1]}, "2 tokens and 1 types"),
        ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.bos_token_id": 7}, "bos_token_id is 7, but there are 1"),
        ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "x"}, "in the way 'x'"),
        ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "llama"}, "1 tokens and 0 scores"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.chat_template": 3},
            "chat_template is 3; it must be a text",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, facts, words):
    with pytest.raises(CheckpointError, match=words):
        make_folder(
            write_gguf_checkpoint("llama", tmp_path / "a.gguf", {"tokenizer.ggml.tokens": ["a"], **facts}),
            tmp_path / "cache",
        )


def test_an_answer_of_gpt_oss_ends_behind_its_last_message(tmp_path):
    """Messages end with a token that ends the answers of other models."""
    tokens = ["a", "<|end|>", "<|return|>", "<|call|>"]
    facts = {"tokenizer.ggml.token_type": np.array([1, 3, 3, 3]), "tokenizer.ggml.model": "gpt2"}
    facts |= {"tokenizer.ggml.pre": "gpt-4o", "tokenizer.ggml.eos_token_id": 2}
    for own, ends in ((tokens, [2, 3]), ([*tokens[:2], "b", "c"], [1, 2])):
        path = write_gguf_checkpoint("llama", tmp_path / "a.gguf", {**facts, "tokenizer.ggml.tokens": own})
        folder = make_folder(path, tmp_path / f"cache{ends}")
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ends


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"deepseek2.expert_gating_func": 3}, "expert_gating_func is 3; it must be 2, or nothing"),
        ({"deepseek2.rope.scaling.yarn_attn_factor": 0.7}, "yarn_attn_factor is 0.7; it must be 1, or 1.1386"),
        ({"deepseek2.attention.indexer.top_k": 4}, "indexer.top_k is 4. Nothing is known of it"),
    ],
)
def test_what_is_not_read_of_latent_attention_is_refused_by_name(tmp_path, facts, words):
    with pytest.raises(CheckpointError, match=words):
        make_folder(write_gguf_checkpoint("deepseek_v3", tmp_path / "a.gguf", facts), tmp_path / "cache")


def test_keys_of_latents_without_values_are_missed(tmp_path):
    hf = config_of("deepseek_v3")
    in_file = tensors_of(hf, tensors_of_checkpoint("deepseek_v3"))
    del in_file["blk.1.attn_v_b.weight"]
    with pytest.raises(CheckpointError, match="has blk.1.attn_k_b.weight, but no such values"):
        make_folder(write_gguf(tmp_path / "a.gguf", facts_of(hf), in_file), tmp_path / "cache")
