#!/usr/bin/env python
"""Compile the step programs of large models for TPU slices that are not here, and print what they take on a chip.

    python scripts/compile_topologies.py [CASE ...] [--depths FEW MORE | --whole] [--json FILE]

Needs the extra `aot-tpu`, and neither weights nor network: of each model the numbers of its published config.json are
below. The programs are the engine's own, as `jaxpaged plan` compiles them; nothing is run. Layers are unrolled, and a
program of all of them takes the compiler many minutes. So each program is compiled at two depths, with the arrays of
the KV cache as long as the whole model's, and what a further layer adds is added for the others; --whole compiles all
layers instead. Weights, requests' state and KV blocks are those of the whole model, counted from its shapes.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import facts_of
from jaxpaged.messages import ProgramKey
from jaxpaged.models.registry import model_for
from jaxpaged.tools.planning.plan import PlannedProgram
from jaxpaged.tools.planning.planner import Planner
from jaxpaged.tools.planning.targets import Target, parse_target
from pallas_kernels.tpu_targets import why_not

TOKENS = (64, 2048)
"""Of the two steps that are compiled, of each attention rank: one of as many requests, and a piece of a prompt."""
CONTEXT = 8192
"""Tokens of a request."""

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
GPT_OSS_120B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"},
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


@dataclass(frozen=True)
class Case:
    """A model on all devices of a target. `depths`: two numbers of layers of a stage, between which lie layers as the
    others."""

    model: str
    hf: dict[str, Any]
    target: str
    depths: tuple[int, int] = (1, 2)
    options: dict[str, Any] = field(default_factory=dict)


SPREAD, INT8 = {"enable_expert_parallel": True}, {"quantization": "int8"}
CASES = {
    "llama-v5e": Case("Llama-3.1-70B", LLAMA_70B, "v5e:4x4"),
    "llama-v6e": Case("Llama-3.1-70B", LLAMA_70B, "v6e:2x4"),
    "qwen3-v6e": Case("Qwen3-235B-A22B", QWEN3_235B, "v6e:4x4", options=SPREAD | INT8),
    "gpt-oss-v6e": Case("GPT-OSS-120B", GPT_OSS_120B, "v6e:2x2", (2, 4), SPREAD | INT8),
    "deepseek-v6e": Case("DeepSeek-V3", DEEPSEEK_V3, "v6e:8x8", (4, 5), SPREAD),
    "llama-v5e-dcp": Case("Llama-3.1-70B", LLAMA_70B, "v5e:4x4", options={"decode_context_parallel_size": 2}),
    "deepseek-v6e-dcp": Case(
        "DeepSeek-V3", DEEPSEEK_V3, "v6e:8x8", (4, 5), SPREAD | {"decode_context_parallel_size": 8}
    ),
    "llama-v6e-pp": Case("Llama-3.1-70B", LLAMA_70B, "v6e:2x4", options={"pipeline_parallel_size": 2}),
    "gpt-oss-v6e-ranks": Case(
        "GPT-OSS-120B", GPT_OSS_120B, "v6e:2x4", (2, 4), SPREAD | INT8 | {"data_parallel_size": 2}
    ),
    "qwen3-v6e-ranks": Case(
        "Qwen3-235B-A22B", QWEN3_235B, "v6e:4x4", options=SPREAD | INT8 | {"data_parallel_size": 4}
    ),
    "deepseek-tpu7x": Case("DeepSeek-V3", DEEPSEEK_V3, "tpu7x:2x2x4", (4, 5), SPREAD),
}


def planner_of(case: Case, target: Target, num_layers: int, tokens: Sequence[int] = TOKENS, **options: Any) -> Planner:
    """The engine of a case with so many layers, over all its stages, whose steps have so many tokens."""
    size = target.num_devices // (num_stages(case) * case.options.get("data_parallel_size", 1))
    hf = case.hf | {"num_hidden_layers": num_layers}
    model = model_for(hf)
    decoder = model.config_from_hf(hf)
    given = {
        "model": case.model,
        "max_model_len": CONTEXT,
        "max_num_seqs": min(tokens),
        "token_buckets": tuple(tokens),
        "max_num_batched_tokens": max(tokens),
        "num_scheduler_steps": 1,
        "tensor_parallel_size": size,
    }
    config = EngineConfig.from_options(**given | case.options | options)
    return Planner(config.resolve(facts_of(decoder), target.platform), model, decoder, target)


def num_stages(case: Case) -> int:
    return case.options.get("pipeline_parallel_size", 1)


def programs_at(planner: Planner) -> Iterator[PlannedProgram]:
    """All forward programs, of every stage, and the plain sampler of the most rows, compiled one after another."""
    keys = [ProgramKey("forward", size) for size in planner.engine_spec.token_buckets]
    for key in [*keys, ProgramKey("sample", planner.config.scheduler.max_num_seqs)]:
        yield from planner.compiler.compile_program(key)


def grown(few: PlannedProgram, more: PlannedProgram, factor: float) -> dict[str, Any]:
    """What a program needs of which `more` has some layers more than `few`, and the whole `factor` times as many.

    A deeper program may happen to take less room for temporaries; the whole then counts as the larger of the two.
    """
    line = lambda a, b: round(a + factor * (b - a))
    of_temporaries = (few.temporary_bytes, more.temporary_bytes)
    kinds = sorted(few.collectives.keys() | more.collectives.keys())
    return {
        "program": few.name,
        "error": few.error or more.error,
        "temporary_bytes": max(line(*of_temporaries), *of_temporaries),
        "code_bytes": line(few.code_bytes, more.code_bytes),
        "collectives": {kind: line(few.collectives.get(kind, 0), more.collectives.get(kind, 0)) for kind in kinds},
        "waited_bytes": line(few.waited_bytes, more.waited_bytes),
        "hidden_bytes": line(few.hidden_bytes, more.hidden_bytes),
        "sent_bytes": more.sent_bytes,
        "stage": more.stage,
        "compile_seconds": [round(each.compile_seconds, 1) for each in (few, more)],
    }


def measure(case: Case, depths: tuple[int, int], tokens: Sequence[int] = TOKENS) -> dict[str, Any]:
    """All that is known of a case. Equal depths: the programs of so many layers as they are."""
    target, stages = parse_target(case.target), num_stages(case)
    whole = planner_of(case, target, num_layers := case.hf["num_hidden_layers"], tokens)
    num_blocks = max(whole.num_blocks, whole.blocks_per_request + 1)
    compiled = {
        depth: list(programs_at(planner_of(case, target, stages * depth, tokens, num_gpu_blocks_override=num_blocks)))
        for depth in sorted(set(depths))
    }
    few, more = (compiled[depth] for depth in depths)
    of_stages = whole.stage_plans()
    factors = [(each.num_layers - depths[0]) / (depths[1] - depths[0] or 1) for each in of_stages]
    fullest = max(of_stages, key=lambda each: each.needed_bytes)
    return {
        "model": case.model,
        "target": case.target,
        "devices": target.num_devices,
        "hosts": target.num_hosts,
        "layers": num_layers,
        "compiled_layers": list(depths),
        "options": case.options,
        "device_bytes": target.device.memory,
        "stages": [(each.num_layers, each.weight_bytes) for each in of_stages],
        "weight_bytes": fullest.weight_bytes,
        "state_bytes": fullest.state_bytes,
        "reserved_bytes": fullest.reserved_bytes,
        "kv_bytes": fullest.kv_bytes,
        "requests": whole.concurrency(CONTEXT),
        "programs": [grown(a, b, factors[max(a.stage - 1, 0)]) for a, b in zip(few, more, strict=True)],
    }


def case_line(found: dict[str, Any]) -> str:
    """Memory of one device."""
    gib = lambda size: f"{size / 2**30:.2f}"
    sizes = [found["weight_bytes"], found["kv_bytes"], max(each["temporary_bytes"] for each in found["programs"])]
    of_code = [(each["stage"], each["code_bytes"]) for each in found["programs"]]
    sizes.append(max(sum(size for stage, size in of_code if stage == one) for one, _ in of_code))
    options = " ".join(f"{name}={value}" for name, value in found["options"].items()) or "-"
    whole = f"{gib(sum(sizes) + found['state_bytes'])} of {gib(found['device_bytes'])}"
    numbers = [str(found["devices"]), *map(gib, sizes), whole, str(found["requests"])]
    return " | ".join([f"| {found['model']}", found["target"], options, *numbers]) + " |"


def program_line(found: dict[str, Any], program: dict[str, Any]) -> str:
    where = [f"| {found['model']}", found["target"], program["program"]]
    seconds = ", ".join(f"{each:.0f}" for each in program["compile_seconds"])
    numbers = [f"{program[name] / 2**20:,.0f}" for name in ("temporary_bytes", "code_bytes")]
    return " | ".join([*where, *numbers, exchanged(program), seconds]) + " |"


def exchanged(program: dict[str, Any]) -> str:
    """Collectives of a program by kind, and their bytes."""
    if program["error"]:
        return f"does not compile: {program['error']}"
    counts = ", ".join(f"{count} {kind}" for kind, count in program["collectives"].items()) or "none"
    size, hidden = program["waited_bytes"] + program["hidden_bytes"], program["hidden_bytes"]
    sent = f"; {program['sent_bytes'] / 1e6:,.1f} MB to another stage" if program["sent_bytes"] else ""
    return f"{counts}; {size / 1e6:,.0f} MB, {hidden / max(size, 1):.0%} hidden{sent}"


HEADINGS = (
    ("model", "target", "options", "devices", "weights", "KV blocks", "temporaries", "code", "all", f"of {CONTEXT}"),
    ("model", "target", "program", "temporaries, MiB", "code, MiB", "collectives", "seconds"),
)
"""GiB of one device and requests of so many tokens that fit; and each program."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument(
        "--depths", nargs=2, type=int, metavar=("FEW", "MORE"), help="layers of a stage in the two compilations"
    )
    parser.add_argument("--whole", action="store_true", help="compile all layers, once")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="of the steps (default: 64 2048)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too, a line for each case")
    options = parser.parse_args()
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"there is no case {', '.join(sorted(unknown))}. Choose of {', '.join(CASES)}.")
    if options.depths and (options.whole or not 0 < options.depths[0] < options.depths[1]):
        parser.error("--depths takes two numbers of layers, the smaller one first, and no --whole beside it.")
    if why_not():
        sys.exit(str(why_not()))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # programs for absent devices cannot be read back
    lines = []
    for case in map(CASES.__getitem__, options.cases or CASES):
        print(f"{case.model} on {case.target} ...", file=sys.stderr)
        layers = case.hf["num_hidden_layers"]
        whole = layers // num_stages(case)
        depths = (whole, whole) if options.whole else tuple(options.depths or case.depths)
        lines.append(measure(case, depths, options.tokens))
        if options.json:
            options.json.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    print("compiled and not run")
    of_programs = [program_line(each, program) for each in lines for program in each["programs"]]
    for heading, table in zip(HEADINGS, (map(case_line, lines), of_programs), strict=True):
        print("", f"| {' | '.join(heading)} |", "|---" * len(heading) + "|", *table, sep="\n")


if __name__ == "__main__":
    main()
