"""config.json of every architecture: both spellings, defaults, and an error for what would change the maths."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.kv_cache_spec import AttentionSpec
from jaxpaged.models.config import HARMLESS_FIELDS, READ_BY_OTHERS, facts_text, load_hf_config
from jaxpaged.models.registry import MODELS, model_for
from tests.models.checkpoints import (
    COHERE,
    CONFIGS,
    EXAONE4,
    GEMMA3,
    GEMMA4,
    GLM4_MOE,
    GPT_OSS,
    LLAMA,
    LLAMA4,
    LONGROPE_DIVISORS,
    MISTRAL,
    MIXTRAL,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3_MOE,
    SMOLLM3,
)

ROOT = Path(__file__).parents[2] / "jaxpaged"
READERS = (
    "models/config.py",
    "models/registry.py",
    "engine/pooling/pooler.py",
    "engine/input/generation_config.py",
)


def parse(hf, language_model_only=False):
    return model_for(hf, language_model_only).config_from_hf(hf)


def without(hf, *names):
    return {name: value for name, value in hf.items() if name not in names}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_transformers_wrote_anew_means_the_same(name, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(CONFIGS[name]))
    AutoConfig.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "new")
    assert parse(load_hf_config(tmp_path / "new")) == parse(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_are_hashable_and_equal_when_made_twice(name):
    assert hash(parse(CONFIGS[name])) == hash(parse(dict(CONFIGS[name])))


def test_the_publishers_spelling_of_mimo_v2_means_that_of_transformers():
    hf = CONFIGS["mimo_v2"]
    names = ("layer_types", "mlp_layer_types", "rope_parameters", "sliding_window")
    published = {
        **without(hf, *names),
        "hybrid_layer_pattern": [0, 1, 1],
        "moe_layer_freq": [0, 1, 1],
        "sliding_window_size": 8,
        "rope_theta": 5000.0,
        "swa_rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "swa_v_head_dim": 10,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": None,
    }
    assert parse(published) == parse(hf)
    with pytest.raises(CheckpointError, match="swa_head_dim is 12; of MiMo-V2-Flash only 16"):
        parse({**published, "swa_head_dim": 12})


def test_positions_and_gates_of_a_laguna_have_several_spellings():
    hf = CONFIGS["laguna"]
    ropes = hf["rope_parameters"]
    of_full = without(ropes["full_attention"], "partial_rotary_factor")
    apart = {
        **without(hf, "rope_parameters", "mlp_layer_types"),
        "rope_scaling": of_full,
        "swa_rope_parameters": ropes["sliding_attention"],
        "partial_rotary_factor": 0.5,
        "mlp_only_layers": [0],
        "gating": True,
        "gating_types": ["per_head", "per_head"],
    }
    assert parse(apart) == parse(hf)
    with pytest.raises(CheckpointError, match="gating_types is .*'per_element'"):
        parse({**hf, "gating_types": ["per_head", "per_element"]})
    kinds = {"num_hidden_layers": 3, "layer_types": [*hf["layer_types"], "sliding_attention"]}
    kinds["mlp_layer_types"] = [*hf["mlp_layer_types"], "sparse"]
    with pytest.raises(CheckpointError, match=r"heads_per_layer is \[8, 16, 8\]; .* one kind of layer_types"):
        parse({**hf, **kinds, "num_attention_heads_per_layer": [8, 16, 8]})


def test_a_wrapper_of_a_model_with_images_gives_the_text_model():
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "model_type": "gemma3_text",
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    config = parse(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": text,
            "vision_config": {"x": 1},
            "eos_token_id": [1, 106],
            "boi_token_index": 255999,
        },
        language_model_only=True,
    )
    assert (config.vocab_size, config.num_heads, config.head_dim) == (262_208, 8, 256)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (1, 106))
    assert [layer.window for layer in config.layers[:6]] == [1024] * 5 + [None]
    assert (config.layers[5].rope.theta, config.layers[5].rope.factor) == (1_000_000.0, 8.0)
    assert (config.layers[0].rope.theta, config.layers[0].rope.factor) == (10_000.0, 1.0)
    assert config.max_position_embeddings == 131_072


def test_null_and_missing_fields_differ_where_transformers_makes_them_differ():
    assert parse(MISTRAL).layers[0].window == 4096
    assert parse({**MISTRAL, "sliding_window": None}).layers[0].window is None
    gemma2 = without(CONFIGS["gemma2"], "attn_logit_softcapping", "final_logit_softcapping")
    assert (parse(gemma2).attn_soft_cap, parse(gemma2).final_soft_cap) == (50.0, 30.0)
    assert parse({**gemma2, "attn_logit_softcapping": None}).attn_soft_cap is None


def test_one_base_serves_all_layers_of_an_olmo_3_and_only_those_without_a_window_are_stretched():
    window, full = parse(CONFIGS["olmo3"]).layers
    stretched = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    old = without(CONFIGS["olmo3"], "rope_parameters") | {"rope_theta": 20000.0, "rope_scaling": stretched}
    assert parse(old).layers == (window, full)
    assert (window.rope.rope_type, full.rope.rope_type) == ("default", "yarn")


def test_a_published_gpt_oss_says_nothing_of_its_type_and_half_of_its_layers_has_a_window():
    hf = without(GPT_OSS, "torch_dtype", "rope_scaling", "rope_theta", "swiglu_limit", "head_dim") | {
        "max_position_embeddings": 131_072,
        "initial_context_length": 4096,
        "experts_per_token": 2,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }
    config = parse(hf)
    assert (config.dtype, config.max_position_embeddings, config.head_dim) == ("bfloat16", 131_072, 64)
    assert [layer.window for layer in config.layers] == [9, None]
    rope = config.layers[0].rope
    assert rope == config.layers[1].rope
    assert (rope.theta, rope.factor, rope.original_max_position, rope.truncate) == (150_000.0, 32.0, 4096, False)
    assert (config.activation.alpha, config.activation.limit) == (1.702, 7.0)


def test_a_llama_4_that_sees_images_has_chunks_where_it_rotates():
    text = without(LLAMA4, "architectures", "no_rope_layers", "attention_chunk_size") | {
        "num_hidden_layers": 8,
        "max_position_embeddings": 16_384,
    }
    hf = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text, "vision_config": {"x": 1}}
    config, model = parse(hf, language_model_only=True), model_for(hf, language_model_only=True)
    assert [layer.chunk for layer in config.layers] == [8192, 8192, 8192, None] * 2
    assert [layer.rope is None for layer in config.layers] == [False, False, False, True] * 2
    assert (config.sparse_layers, config.experts.width, config.intermediate_size) == ((1, 3, 5, 7), 40, 80)
    specs = model.attention_specs(replace(config, max_model_len=8192), 16, 2, 1)
    assert {spec.chunk for spec in specs} == {None}, "no request is longer than a chunk"
    with pytest.raises(ConfigError, match="block_size 24 .* 8192 .* attention_chunk_size"):
        model.attention_specs(replace(config, max_model_len=8193), 24, 2, 1)


def test_qwen_windows_start_late_and_only_when_switched_on():
    hf = {**QWEN2, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3}
    assert [layer.window for layer in parse({**hf, "use_sliding_window": True}).layers] == [None, 5, 5]
    assert [layer.window for layer in parse(hf).layers] == [None] * 3


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 6, "long_factor": [1.0] * 6}, 128),
        (None, 128),
    ],
)
def test_the_longest_sequence_counts_the_scaling_in(scaling, expected):
    config = parse({**LLAMA, "rope_scaling": scaling})
    assert config.max_position_embeddings == config.max_model_len == expected


def test_longrope_scales_attention_by_the_ratio_of_lengths():
    hf = {**PHI3, "partial_rotary_factor": 0.75, "max_position_embeddings": 1024}
    for name in ("su", "longrope", "yarn"):
        rope = parse({**hf, "rope_scaling": {"type": name, **LONGROPE_DIVISORS}}).layers[0].rope
        assert rope.rope_type == "longrope"
        assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(8) / math.log(128)))


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"type": "yarn", "factor": 2.0}])
def test_sections_of_three_positions_go_with_every_scaling(scaling):
    rope = parse({**LLAMA, "rope_scaling": {**scaling, "mrope_section": [1, 2, 3]}}).layers[0].rope
    assert (rope.sections, rope.mixes_sections) == ((1, 2, 3), False)
    turns = {**scaling, "mrope_section": [2, 2, 2], "mrope_interleaved": True}
    rope = parse({**LLAMA, "rope_scaling": turns}).layers[0].rope
    assert (rope.sections, rope.mixes_sections) == ((2, 2, 2), True)


def test_every_layer_says_what_it_caches():
    hf = CONFIGS["gemma3"]
    specs = model_for(hf).attention_specs(parse(hf), block_size=16, dtype_bytes=2, num_model_shards=8)
    window, full = (AttentionSpec(16, 8, 12, 2, window=seen, head_copies=4) for seen in (10, None))
    assert specs == [window, window, full]


def test_harmless_fields_pass():
    hf = {
        **LLAMA,
        "use_cache": True,
        "_name_or_path": "x",
        "pretraining_tp": 2,
        "unsloth_fixed": True,
        "new_flag": False,
        "num_beams": 1,
        "typical_p": 1.0,
        "temperature": 0.6,
        "cache_implementation": "static",
        "_experts_implementation": "grouped_mm",
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
        "is_causal": None,
    }
    assert parse(hf) == parse(LLAMA)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_causal", False),
        ("use_rope", False),
        ("pruned_heads", {"0": [1]}),
        ("prefix", "Once "),
        ("min_length", 5),
        ("num_beams", 4),
        ("typical_p", 0.9),
        ("no_repeat_ngram_size", 3),
        ("bad_words_ids", [[5]]),
        ("suppress_tokens", [7]),
        ("begin_suppress_tokens", [7]),
        ("forced_bos_token_id", 5),
        ("forced_eos_token_id", 2),
        ("length_penalty", 2.0),
        ("diversity_penalty", 0.5),
        ("num_return_sequences", 2),
        ("exponential_decay_length_penalty", [1, 1.1]),
        ("encoder_no_repeat_ngram_size", 2),
        ("cache_implementation", "quantized"),
        ("_rotary_style", "half"),
        ("_sliding_window_pattern", 3),
        ("full_attn_mod", 2),
    ],
)
def test_a_field_that_changes_results_is_never_passed_over(name, value):
    for hf in (LLAMA, QWEN2_MOE, GPT_OSS):
        with pytest.raises(CheckpointError, match=f"{name} is .*Nothing is known of this field"):
            parse({**hf, name: value})


def test_no_field_is_harmless_that_says_how_results_are_made():
    """Each of them is read by somebody, or refused."""
    assert not HARMLESS_FIELDS & READ_BY_OTHERS
    sources = "".join((ROOT / path).read_text() for path in READERS)
    assert [name for name in sorted(READ_BY_OTHERS - {"label2id"}) if f'"{name}"' not in sources] == []


def test_fields_beside_the_text_of_a_model_with_images_are_read_or_refused():
    hf = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}, "mm_tokens_per_image": 4}
    text = without(GEMMA3, "architectures")
    assert parse({**hf, "text_config": text}).final_soft_cap is None
    assert parse({**hf, "text_config": text, "final_logit_softcapping": 2.0}).final_soft_cap == 2.0
    with pytest.raises(CheckpointError, match="use_bidirectional_attention"):
        parse({**hf, "text_config": text, "use_bidirectional_attention": True})


# what is changed, and words that the error must hold
REFUSED = {
    "unknown field": ({**LLAMA, "residual_multiplier": 0.22}, ["residual_multiplier", "0.22"]),
    "experts": ({**MISTRAL, "num_local_experts": 8}, ["num_local_experts", "8"]),
    "quantisation": (
        {**LLAMA, "quantization_config": {"quant_method": "hqq"}},
        ["quantised with HQQ", "16-bit version"],
    ),
    "rope type": ({**LLAMA, "rope_scaling": {"type": "spiral", "factor": 2.0}}, ["'spiral'", "llama3"]),
    "rope parameter": ({**LLAMA, "rope_scaling": {"type": "default", "mrope_sections": [1, 2]}}, ["'mrope_section'?"]),
    "two sections": (
        {**LLAMA, "rope_scaling": {"type": "default", "mrope_section": [2, 4]}},
        ["mrope_section", "three"],
    ),
    "sections of other heads": (
        {**LLAMA, "rope_scaling": {"type": "default", "mrope_section": [2, 3, 2]}},
        ["mrope_section", "6 pairs"],
    ),
    "sections that cannot take turns": (
        {**LLAMA, "rope_scaling": {"type": "default", "mrope_section": [1, 4, 1], "mrope_interleaved": True}},
        ["mrope_section", "a third"],
    ),
    "a section that is no number": (
        {**LLAMA, "rope_scaling": {"type": "default", "mrope_section": [2, True, 3]}},
        ["mrope_section", "True"],
    ),
    "rope parameter missing": ({**LLAMA, "rope_scaling": {"type": "linear"}}, ["'linear'", "factor"]),
    "rope parameter of a wrong type": (
        {**LLAMA, "rope_scaling": {"type": "linear", "factor": "two"}},
        ["factor", "'two'"],
    ),
    "rope is a list": ({**LLAMA, "rope_scaling": [1]}, ["rope_scaling", "[1]"]),
    "divisors do not fit": (
        {**LLAMA, "rope_scaling": {"type": "longrope", **LONGROPE_DIVISORS}},
        ["short_factor", "3", "6"],
    ),
    "odd rotary part": ({**PHI3, "partial_rotary_factor": 0.4}, ["partial_rotary_factor", "3", "8"]),
    "activation": ({**LLAMA, "hidden_act": "relu"}, ["hidden_act", "'relu'", "silu"]),
    "missing size": (without(LLAMA, "hidden_size"), ["lacks hidden_size"]),
    "size is text": ({**LLAMA, "hidden_size": "48"}, ["hidden_size", "'48'"]),
    "negative size": ({**LLAMA, "vocab_size": -1}, ["vocab_size", "-1"]),
    "flag is text": ({**LLAMA, "attention_bias": "yes"}, ["attention_bias", "'yes'"]),
    "eps is zero": ({**LLAMA, "rms_norm_eps": 0.0}, ["rms_norm_eps", "0.0"]),
    "heads do not divide": ({**LLAMA, "num_key_value_heads": 3}, ["8", "3", "num_key_value_heads"]),
    "odd head": ({**LLAMA, "head_dim": 7}, ["head_dim", "7"]),
    "dtype": ({**LLAMA, "torch_dtype": "float8"}, ["dtype", "'float8'"]),
    "token id is text": ({**LLAMA, "eos_token_id": ["</s>"]}, ["eos_token_id", "</s>"]),
    "layer types": ({**GEMMA3, "layer_types": ["full_attention"]}, ["layer_types", "3 entries"]),
    "unknown layer type": ({**QWEN2, "layer_types": ["linear_attention"] * 2}, ["layer_types", "linear_attention"]),
    "mixed mistral": ({**MISTRAL, "layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "Mistral"]),
    "both directions": ({**GEMMA3, "use_bidirectional_attention": True}, ["use_bidirectional_attention", "True"]),
    "unknown architecture": (
        {**LLAMA, "architectures": ["LlamaForCasualLM"]},
        ["LlamaForCausalLM", "models --supported"],
    ),
    "more experts than there are": ({**MIXTRAL, "num_experts_per_tok": 6}, ["num_experts_per_tok", "6", "5"]),
    "dense layers": ({**QWEN3_MOE, "mlp_only_layers": "all"}, ["mlp_only_layers", "'all'"]),
    "groups of experts": ({**GLM4_MOE, "n_group": 3}, ["n_group", "3", "8"]),
    "too few groups of experts": ({**GLM4_MOE, "topk_group": 1}, ["num_experts_per_tok", "3", "2"]),
    "rotation of other layers": ({**SMOLLM3, "no_rope_layers": [1]}, ["no_rope_layers", "2 entries"]),
    "norms of queries": ({**COHERE, "use_qk_norm": True}, ["use_qk_norm", "not supported"]),
    "letters of layers": ({**EXAONE4, "sliding_window_pattern": "LLLG"}, ["sliding_window_pattern", "layer_types"]),
    "rope of no kind of layers": (
        {**CONFIGS["olmo3"], "rope_parameters": {"full_attention": {}, "sliding_atention": {"rope_theta": 2.0}}},
        ["sliding_atention", "no kind of layers", "Did you mean 'sliding_attention'?"],
    ),
    "rope of both kinds of layers": (
        {**GEMMA4, "rope_parameters": {"rope_type": "linear", "factor": 8.0}},
        ["rope_type", "'linear'", "no kind of layers"],
    ),
    "windows of experts": ({**QWEN2_MOE, "use_sliding_window": True}, ["use_sliding_window", "not supported"]),
    "4 bits in halves of groups": (
        {**GPT_OSS, "intermediate_size": 80, "quantization_config": {"quant_method": "mxfp4"}},
        ["80", "32", "mxfp4"],
    ),
    "8 bits of gpt-oss": ({**GPT_OSS, "quantization_config": {"quant_method": "eetq"}}, ["with EETQ", "16-bit"]),
    "chunks of other layers": ({**LLAMA4, "layer_types": ["sliding_attention"] * 3}, ["layer_types", "chunked_att"]),
    "experts of other layers": ({**LLAMA4, "moe_layers": [3]}, ["moe_layers", "[3]"]),
    "no architecture": (without(LLAMA, "architectures"), ["architectures", "None"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_change_the_maths_is_an_error_naming_it(kind):
    hf, words = REFUSED[kind]
    with pytest.raises(CheckpointError) as error:
        parse(hf)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("text", "words"), [(None, "does not exist"), ("{", "cannot be read"), ("[]", "not a JSON object")]
)
def test_an_unreadable_config_is_an_error_naming_the_file(text, words, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=words) as error:
        load_hf_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_the_registry_knows_every_architecture_of_the_goldens():
    assert {hf["architectures"][0] for hf in CONFIGS.values()} <= MODELS.keys()


@pytest.mark.parametrize("name", ["DbrxForCausalLM", "Qwen3NextForCausalLM", "Gemma3nForCausalLM"])
def test_another_architecture_is_not_taken_for_a_slip_of_ours(name):
    with pytest.raises(CheckpointError, match=f"{name}, which is not supported yet. Serve one that is") as refused:
        model_for({"architectures": [name]})
    assert "Qwen3ForCausalLM" not in str(refused.value)


FACTS = {
    "llama": "7fafbca90722af1c",
    "gemma3": "accd84bad5b8e99c",
    "deepseek_v3": "8993554d17c2601e",
    "qwen3_moe": "49b46ddcd8008701",
    "llama4": "13c576a93f488087",
    "gpt_oss": "7972c908f6156f4a",
}
"""Digests of `str(config)` in November 2026, when pages on disks were first named by it."""


@pytest.mark.parametrize("name", FACTS)
def test_pages_of_a_model_keep_their_name_from_version_to_version(name):
    config = model_for(CONFIGS[name]).config_from_hf(CONFIGS[name])
    assert hashlib.sha256(facts_text(config).encode()).hexdigest()[:16] == FACTS[name]
    assert facts_text(replace(config, matmul_backend="other")) != facts_text(config)
