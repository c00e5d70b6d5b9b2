#!/usr/bin/env python
"""Compile encode programs of published models for devices that are not here, and print what they take.

    python scripts/compile_towers.py [MODEL ...] [--targets TARGET ...] [--sizes SIZE ...] [--json FILE]

Needs the extras `aot-tpu` and `aot-gpu`, and neither weights nor network: of each model the numbers of its published
config.json are below. The programs are the engine's own, as `jaxpaged plan` compiles them, of the whole tower on one
device; of the language model only the width matters, so it has one layer. Nothing is run. A loop's products are counted
once by a compiler, so FLOPs are counted from the shapes.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import facts_of
from jaxpaged.messages import ProgramKey
from jaxpaged.models.registry import model_for
from jaxpaged.models.vision.interface import VisionConfig
from jaxpaged.multimodal.processors import processor_of
from jaxpaged.params.sharding import bytes_on_device
from jaxpaged.tools.planning.planner import Planner
from jaxpaged.tools.planning.targets import parse_target
from jaxpaged.worker.costs import encode_flops

GEMMA3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
QWEN3_VL_8B = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
QWEN3_PICTURES = {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "gemma3-27b": (GEMMA3_27B, {}, (1, 4)),
    "qwen3-vl-8b": (QWEN3_VL_8B, QWEN3_PICTURES, (4096, 16384)),
}
"""Name -> config.json, preprocessor_config.json, and the sizes that are compiled: pictures, or patches."""
TARGETS = ("v5e:1x1", "v6e:1x1", "tpu7x:1x1x1", "h100")
CONTEXT = 16384


def planner_of(name: str, target_name: str) -> Planner:
    """The engine of a model on one device of a target."""
    hf, pictures, _ = MODELS[name]
    target, model = parse_target(target_name), model_for(hf)
    assert model.vision is not None
    model = replace(model, vision=replace(model.vision, processor=processor_of(hf, pictures)))
    decoder = model.config_from_hf(hf)
    config = EngineConfig.from_options(
        model=name,
        max_model_len=CONTEXT,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        token_buckets=(2048,),
        num_gpu_blocks_override=2048,
    )
    return Planner(config.resolve(facts_of(decoder), target.platform), model, decoder, target)


def grid_of(config: VisionConfig, size: int) -> tuple[int, int, int]:
    """Of what fills a batch: so many items, or one picture."""
    return (size, 1, config.embeds_per_item) if config.is_fixed else (1, 1, config.num_embeds(size))


def measure(name: str, target: str, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    planner = planner_of(name, target)
    encoder = planner.engine_spec.encoder
    assert encoder is not None, f"{name} has no tower"
    rows = []
    for size in sizes:
        (program,) = planner.compiler.compile_program(ProgramKey("encode", size))
        rows.append(
            {
                "model": name,
                "target": target,
                "size": size,
                "error": program.error,
                "weights": sum(map(bytes_on_device, jax.tree.leaves(planner.engine_spec.param_shapes.vision))),
                "temporaries": program.temporary_bytes,
                "code": program.code_bytes,
                "flops": encode_flops(planner.engine_spec, grid_of(encoder.config, size)),
                "compile_seconds": round(program.compile_seconds, 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--sizes", nargs="+", type=int, help="pictures or patches of a batch")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for target in arguments.targets:
        for name in arguments.models:
            rows += measure(name, target, tuple(arguments.sizes or MODELS[name][2]))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
