"""What descriptions of quantised checkpoints say of which modules, and what is refused, and why."""

import json

import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.models.config import load_hf_config
from jaxpaged.params.schemes.floats4 import Mxfp4, Nvfp4
from jaxpaged.params.schemes.fp8 import Float8
from jaxpaged.params.schemes.reading import quantization_of
from jaxpaged.params.schemes.scheme import EMBEDDING, HEAD, LINEAR, OTHER
from jaxpaged.params.schemes.whole_numbers import Awq, Gptq, Integers, PackedIntegers
from tests.models.quantised_checkpoints import F8, W4, W8, ct

LAYER = "model.layers.3"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
FOUR = Gptq(4, 128, True, False, False)


def scheme_of(given, module, kind=LINEAR):
    return quantization_of(given).scheme_of(module, kind)


def test_lists_are_matched_as_each_format_means_them():
    q, gate, gate_proj = f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.gate", f"{LAYER}.mlp.gate_proj"
    for names, left, kept in (
        (["gate"], gate, gate_proj),
        ([gate], gate, gate_proj),
        (["model.layers.3"], q, "model.layers.33.self_attn.q_proj"),
        (["model.language_model.layers.3.mlp.gate"], gate, gate_proj),
    ):
        given = {**FP8, "modules_to_not_convert": names}
        assert scheme_of(given, left) is None and scheme_of(given, kept) == Float8((128, 128))
    awq = {**AWQ, "modules_to_not_convert": ["gate"]}
    assert scheme_of(awq, gate) is scheme_of(awq, gate_proj) is None and scheme_of(awq, q) == Awq(128, True)
    modelopt = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "exclude_modules": ["lm_head", "model.layers.3.mlp*"],
    }
    assert scheme_of(modelopt, gate) is None and scheme_of(modelopt, q) == Nvfp4(is_divisor=False)
    assert scheme_of({"quant_method": "mxfp4"}, q) == Mxfp4(is_stack=True)


def test_compressed_tensors_names_classes_modules_and_patterns():
    groups = {
        "group_0": {"targets": ["Linear"], "weights": W4},
        "group_1": {"targets": ["re:.*down_proj$"], "weights": F8, "format": "float-quantized"},
        "group_2": {"targets": [f"{LAYER}.self_attn.o_proj"], "weights": W8, "format": "int-quantized"},
    }
    given = {**ct(W4, "pack-quantized"), "config_groups": groups, "ignore": ["lm_head", "re:.*k_proj"]}
    found = [scheme_of(given, f"{LAYER}.{name}") for name in ("self_attn.q_proj", "mlp.down_proj", "self_attn.k_proj")]
    assert found == [PackedIntegers(4, 16, False, False), Float8(), None]
    assert scheme_of(given, f"{LAYER}.self_attn.o_proj") == Integers()
    assert scheme_of(given, "lm_head", HEAD) is None
    assert scheme_of({**given, "ignore": []}, "lm_head", HEAD) == PackedIntegers(4, 16, False, False)
    assert scheme_of(given, "model.embed_tokens", EMBEDDING) is scheme_of(given, f"{LAYER}.mlp.gate", OTHER) is None


def test_rules_of_gptq_give_modules_their_own_numbers_or_leave_them():
    rules = {"-:.*attn.*": {}, r"+:.*\.3\..*up": {"bits": 8}, r".*\.3\..*down": {"group_size": 32, "sym": False}}
    given = {**GPTQ, "dynamic": rules}
    found = [scheme_of(given, f"{LAYER}.{name}") for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")]
    assert found == [None, Gptq(8, 128, True, False, False), Gptq(4, 32, False, False, False)]
    assert scheme_of(given, "model.layers.4.mlp.up_proj") == FOUR
    some = {**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.up_proj"]]}
    assert scheme_of(some, f"{LAYER}.mlp.up_proj") == FOUR and scheme_of(some, f"{LAYER}.mlp.down_proj") is None
    assert scheme_of(GPTQ, "lm_head", HEAD) is None and scheme_of({**GPTQ, "lm_head": True}, "lm_head", HEAD) == FOUR
    assert scheme_of({**GPTQ, "checkpoint_format": "gptq_v2", "desc_act": True}, LAYER) == Gptq(
        4, 128, True, True, True
    )


ALSO_SAID = {
    "GPTQModel": (
        {
            **GPTQ,
            "checkpoint_format": "gptq",
            "lm_head": False,
            "meta": {"quantizer": ["gptqmodel:5.0.0"], "damp_percent": 0.05},
            "pack_dtype": "int32",
            "static_groups": False,
            "true_sequential": True,
        },
        FOUR,
    ),
    "transformers' GPTQ": (
        {**GPTQ, "batch_size": 1, "dataset": "c4", "use_exllama": True, "max_input_length": 9},
        FOUR,
    ),
    "AutoRound": ({**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "iters": 200}, FOUR),
    "AutoAWQ": ({**AWQ, "backend": "autoawq", "do_fuse": False, "modules_to_not_convert": None}, Awq(128, True)),
    "llm-compressor": (
        ct(
            {
                **W8,
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "observer": "minmax",
                "group_size": None,
            },
            "int-quantized",
            version="0.12.2",
            quantization_status="compressed",
            global_compression_ratio=None,
            kv_cache_scheme=None,
            sparsity_config={},
            transform_config={},
        ),
        Integers(),
    ),
    "DeepSeek": ({**FP8, "scale_fmt": "ue8m0"}, Float8((128, 128))),
    "Mistral": ({**FP8, "activation_scheme": "static", "weight_block_size": None, "dequantize": False}, Float8()),
}


@pytest.mark.parametrize("who", ALSO_SAID)
def test_what_tools_write_besides_changes_nothing(who):
    given, scheme = ALSO_SAID[who]
    assert scheme_of(given, f"{LAYER}.mlp.up_proj") == scheme


REFUSED = {
    "3 bits": ({**GPTQ, "bits": 3}, ["bits is 3", "4 or 8", "Use a version of 4 or 8 bits"]),
    "2 bits of AWQ": ({**AWQ, "bits": 2}, ["bits is 2", "Use a version of 4 bits"]),
    "AWQ of another order": ({**AWQ, "version": "gemv"}, ["version is 'gemv'", "'gemm'"]),
    "weights for one GPU": ({**GPTQ, "is_marlin_format": True}, ["is_marlin_format", "reordered"]),
    "groups of nothing": ({**GPTQ, "group_size": 0}, ["group_size is 0"]),
    "a rule that is none": ({**GPTQ, "dynamic": {"+:(": {}}}, ["dynamic", "regular expression"]),
    "3 bits in words": (ct({**W4, "num_bits": 3}, "pack-quantized"), ["num_bits is 3", "4 or 8"]),
    "2:4": (ct(W8, "int-quantized", sparsity_config={"format": "sparse-24-bitmask"}), ["sparse", "without sparsity"]),
    "2:4 in a kernel's order": (ct(W4, "marlin-24"), ["marlin-24", "2:4 sparsity"]),
    "rotations": (
        ct(W4, "pack-quantized", transform_config={"config_groups": {"R1": {}}}),
        ["rotated", "without them"],
    ),
    "asymmetric bytes": (ct({**W8, "symmetric": False}, "int-quantized"), ["symmetric is False"]),
    "no groups": ({"quant_method": "compressed-tensors"}, ["config_groups is None"]),
    "a block of one number": ({**FP8, "weight_block_size": [128]}, ["weight_block_size is [128]", "two positive"]),
    "floats of another kind": ({**FP8, "fmt": "e5m2"}, ["fmt is 'e5m2'"]),
    "something new": ({**FP8, "rotation": "hadamard"}, ["rotation is 'hadamard'", "Nothing is known"]),
    "another algorithm": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        ["quant_algo is 'w4a8_awq'", "nvfp4"],
    ),
    "a list that is none": ({**AWQ, "modules_to_not_convert": "lm_head"}, ["modules_to_not_convert", "a list"]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_read_is_refused_with_what_would_be(what):
    given, words = REFUSED[what]
    with pytest.raises(CheckpointError) as error:
        quantization_of(given)
    assert all(word in str(error.value) for word in ("config.json", *words)), error.value


@pytest.mark.parametrize(
    ("file", "content", "scheme"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "sym": True, "damp_percent": 0.01}, FOUR),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}, Awq(64, True)),
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
            Float8(),
        ),
        ("quantize_config.json", None, None),
    ],
)
def test_files_beside_config_json_say_it_too(file, content, scheme, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text("[" if content is None else json.dumps(content))
    if content is None:
        with pytest.raises(CheckpointError, match="quantize_config.json cannot be read as JSON"):
            load_hf_config(tmp_path)
        return
    found = quantization_of(load_hf_config(tmp_path)["quantization_config"])
    assert found.scheme_of(f"{LAYER}.mlp.up_proj", LINEAR) == scheme and found.source == file
