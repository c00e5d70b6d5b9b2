"""Encoders in GGUF files are the same models as their checkpoints, with the same tokens and the same way of pooling."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from tokenizers import models, normalizers, pre_tokenizers, processors

from jaxpaged.engine.pooling.pooler import load_pooler_defaults
from jaxpaged.errors import CheckpointError
from jaxpaged.models.config import load_hf_config
from jaxpaged.models.pooling import pooling_model
from jaxpaged.models.registry import model_for, task_of
from jaxpaged.params.gguf_folder.folder import make_folder
from tests.models.encoder_checkpoints import CHECKPOINTS, PAIRS, tokens_of, write
from tests.params.formats.gguf.writer import write_gguf
from tests.params.gguf_folder.test_architectures import OTHERWISE_SAID
from tests.params.gguf_folder.test_quantised import in_blocks
from tests.params.test_orbax_format import load_model

NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    **{f"attention.self.{name}": f"attn_{name[0]}" for name in ("query", "key", "value")},
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "final_norm": "output_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "##at", "s", "e", "##e", "!", "北", "京"]
TEXTS = ["The  cats sat!", "THÉ cat\te", "北京 cat", "unknownword the", "", "the!cats"]


def facts_of(hf):
    """As llama.cpp's converter writes them."""
    kind = "modern-bert" if hf["model_type"] == "modernbert" else "bert"
    own = {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.layer_norm_epsilon": float(hf["layer_norm_eps"]),
        "attention.causal": False,
        "pooling_type": 1,
    }
    if kind == "modern-bert":
        own |= {
            "attention.sliding_window": hf["local_attention"],
            "attention.sliding_window_pattern": hf["global_attn_every_n_layers"],
            "rope.freq_base": hf["global_rope_theta"],
            "rope.freq_base_swa": hf["local_rope_theta"],
            "rope.scaling.type": "none",
            "vocab_size": hf["vocab_size"],
        }
    return {"general.architecture": kind, **{f"{kind}.{name}": value for name, value in own.items()}}


def tensors_of(tensors):
    found = {}
    for full, tensor in tensors.items():
        stem, end = full.removeprefix("roberta.").removeprefix("encoder.").rsplit(".", 1)
        if stem.startswith("pooler"):
            continue
        start, _, rest = stem.partition(".")
        is_layer = start in ("layer", "layers")
        number, _, stem = rest.partition(".") if is_layer else ("", "", stem)
        found[f"{f'blk.{number}.' if is_layer else ''}{NAMES[stem]}.{end}"] = tensor
    return found


def loaded(folder):
    hf = load_hf_config(folder)
    model = pooling_model(model_for(hf), task_of(hf["architectures"][0]))
    _, config, params = load_model(model, hf, folder)
    return config, params


@pytest.mark.parametrize("name", ["bert_embed", "modernbert_embed"])
def test_a_file_is_the_same_encoder_as_the_checkpoint(name, tmp_path):
    checkpoint = write(name, tmp_path / "checkpoint")
    tensors = tensors_of(load_file(checkpoint / "model.safetensors"))
    folder = make_folder(write_gguf(tmp_path / "a.gguf", facts_of(CHECKPOINTS[name]), tensors), tmp_path / "cache")
    (config, params), (expected, expected_params) = loaded(folder), loaded(checkpoint)
    for field in dataclasses.fields(expected):
        if field.name not in (*OTHERWISE_SAID, "tie_embeddings"):
            assert getattr(config, field.name) == getattr(expected, field.name), field.name
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)
    assert load_pooler_defaults(folder) == {"pooling_type": "MEAN", "use_activation": True}


def write_xlm_roberta(path, name, others=(), **facts):
    """Without the places before that of the first token, and with matrices of one row as vectors; with `others` in
    place of some tensors."""
    hf, checkpoint = CHECKPOINTS[name], write(name, path / "checkpoint")
    own = tensors_of(load_file(checkpoint / "model.safetensors"))
    own["position_embd.weight"] = own["position_embd.weight"][hf["pad_token_id"] + 1 :]
    own |= {name: own[name][0] for name in ("token_types.weight", "cls.output.weight") if name in own} | dict(others)
    found = {**facts_of(hf), "bert.context_length": len(own["position_embd.weight"]), "bert.pooling_type": 2}
    return write_gguf(path / "a.gguf", {**found, **facts}, own)


def likeliest_words(num_tokens):
    """The tokenizer of `encoder_checkpoints`, as pieces that are words."""
    facts = {
        "model": "t5",
        "tokens": ["<s>", "<pad>", "</s>", "<unk>", "<x>", *(f"▁w{i}" for i in range(5, num_tokens))],
        "scores": np.array([0.0] * 5 + [-1.0] * (num_tokens - 5), np.float32),
        "token_type": np.array([3, 3, 3, 2, 5] + [1] * (num_tokens - 5), np.int32),
        **{f"{name}_token_id": i for i, name in enumerate(("bos", "padding", "eos", "unknown"))},
        "add_sep_token": True,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in facts.items()}


@pytest.mark.parametrize("name", ["xlm_roberta_embed", "xlm_roberta_score"])
def test_a_file_of_xlm_roberta_is_a_bert_without_the_places_before_a_text(name, tmp_path):
    path = write_xlm_roberta(tmp_path, name, **likeliest_words(CHECKPOINTS[name]["vocab_size"]))
    folder = make_folder(path, tmp_path / "cache")
    (config, params), (expected, expected_params) = loaded(folder), loaded(tmp_path / "checkpoint")
    table = expected_params.decoder.embed_positions[expected.first_position :]
    decoder = expected_params.decoder.replace(embed_positions=table)
    jax.tree.map(np.testing.assert_array_equal, params, expected_params.replace(decoder=decoder))
    others = ("architecture", "first_position", "num_positions", "tie_embeddings", *OTHERWISE_SAID)
    for field in dataclasses.fields(expected):
        if field.name not in others:
            assert getattr(config, field.name) == getattr(expected, field.name), field.name
    has_scores = name.endswith("score")
    assert (config.architecture, config.num_labels) == (
        ("BertForSequenceClassification", 1) if has_scores else ("BertModel", 0)
    )
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for texts in ((PAIRS[0][0],), *PAIRS):
        assert tokenizer.encode(*texts).ids == tokens_of(CHECKPOINTS[name], *texts)[0]
    assert load_pooler_defaults(folder) == ({} if has_scores else {"pooling_type": "CLS", "use_activation": True})


def test_what_makes_scores_may_be_in_blocks(tmp_path):
    rows, weights = in_blocks("Q8_0", (64, 64), np.random.default_rng(0))
    path = write_xlm_roberta(tmp_path, "xlm_roberta_score", {"cls.weight": ("Q8_0", rows)})
    _, params = loaded(make_folder(path, tmp_path / "cache"))
    np.testing.assert_array_equal(params.score.dense.weight, weights)


def test_labels_are_those_of_the_file_as_many_as_there_are_scores(tmp_path):
    labelled = {"bert.classifier.output_labels": ["fits"]}
    folder = make_folder(write_xlm_roberta(tmp_path, "xlm_roberta_score", **labelled), tmp_path / "cache")
    assert load_hf_config(folder)["id2label"] == CHECKPOINTS["xlm_roberta_score"]["id2label"]
    wrong = write_xlm_roberta(tmp_path, "xlm_roberta_score", **{"bert.classifier.output_labels": ["no", "yes"]})
    with pytest.raises(CheckpointError, match="output_labels is .'no', 'yes'.; it must be a list of 1"):
        make_folder(wrong, tmp_path / "cache")


def folder_with(tmp_path, **facts):
    checkpoint = write("bert_embed", tmp_path / "checkpoint")
    tensors = tensors_of(load_file(checkpoint / "model.safetensors"))
    found = {**facts_of(CHECKPOINTS["bert_embed"]), **facts}
    return make_folder(write_gguf(tmp_path / "a.gguf", found, tensors), tmp_path / "cache")


@pytest.mark.parametrize("has_capitals", [False, True])
def test_words_have_the_pieces_that_the_model_s_own_tokenizer_gives_them(has_capitals, tmp_path):
    words = [*WORDS, "The"] if has_capitals else WORDS
    in_file = [word[2:] if word.startswith("##") else word if i < 5 else f"▁{word}" for i, word in enumerate(words)]
    of_tokenizer = {
        "model": "bert",
        "tokens": in_file,
        "token_type": np.array([3] * 5 + [1] * (len(words) - 5), np.int32),
        **({"cls_token_id": 2, "seperator_token_id": 3} if has_capitals else {}),
        "unknown_token_id": 1,
        "padding_token_id": 0,
    }
    folder = folder_with(tmp_path, **{f"tokenizer.ggml.{name}": value for name, value in of_tokenizer.items()})
    found = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    own = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    own.normalizer = normalizers.BertNormalizer(lowercase=not has_capitals)
    own.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    own.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    assert [found.encode(text).ids for text in TEXTS] == [own.encode(text).ids for text in TEXTS]
    pairs = [tokenizer.encode(*TEXTS[:2]) for tokenizer in (found, own)]
    assert (pairs[0].ids, pairs[0].type_ids) == (pairs[1].ids, pairs[1].type_ids)
    named = json.loads((folder / "tokenizer_config.json").read_text())
    assert named == {"bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"bert.attention.causal": True}, "bert.attention.causal is True; it must be false"),
        ({"bert.pooling_type": 4}, "gives scores, but not cls.weight, which makes them of hidden states"),
        ({"bert.pooling_type": 7}, "bert.pooling_type is 7; it must be one of 1, 2, 3; of rerankers only"),
        (
            {"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["▁a"]},
            "the tokenizer has no unknown token",
        ),
        ({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["▁a"]}, r"lacks the token \[UNK\]"),
    ],
)
def test_what_is_not_read_is_an_error_that_names_it(facts, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        folder_with(tmp_path, **facts)
