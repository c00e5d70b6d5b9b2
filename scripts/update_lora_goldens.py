#!/usr/bin/env python3
"""Record adapters that PEFT writes for tiny checkpoints, and what its models compute with them: tests/golden/lora/.

    scripts/update_lora_goldens.py [--env FOLDER] [NAME ...]

Of a case NAME there is a folder, with adapter_config.json and adapter_model.safetensors as PEFT saved them, and
logits.json: the logits of the prompt at some positions, and their sums at every position. Checkpoints are made from
their seeds, as in update_golden.py. The suite compares, and needs neither PEFT nor torch. This script makes an
environment of its own beside that of update_golden.py, whose torch and transformers it uses, and runs itself there.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from update_golden import DEFAULT_ENV, NUM_TOP, RECORDED_POSITIONS, environment

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "lora"
OWN_ENV = DEFAULT_ENV.with_name("lora-golden-env")
PACKAGES = ["peft==0.21.2", "accelerate", "psutil"]
RANK, ALPHA = 4, 6
SPREAD = 0.15
"""Deviation of the factors' numbers: so large that every matrix of an adapter changes logits."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]}),
    "rslora_patterns": (
        "qwen2",
        {
            "target_modules": ["q_proj", "k_proj", "up_proj", "lm_head"],
            "use_rslora": True,
            "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
            "alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 11, "up_proj": 3},
        },
    ),
    "fused": ("phi3", {"target_modules": r".*\.(qkv_proj|gate_up_proj|down_proj)"}),
    "tables": ("gemma3", {"target_modules": ["embed_tokens", "lm_head", "down_proj", "k_proj"]}),
    "dora": (
        "llama_mqa_bias_tied",
        {"target_modules": ["q_proj", "o_proj", "up_proj", "embed_tokens"], "use_dora": True},
    ),
    "all_linear": ("qwen3_moe", {"target_modules": "all-linear"}),
    "one_parameter": (
        "mixtral",
        {"target_modules": ["q_proj", "gate"], "target_parameters": ["mlp.experts.down_proj"]},
    ),
    "alternating": (
        "gpt_oss",
        {
            "target_modules": ["k_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "shared_experts": ("qwen2_moe", {"target_modules": "all-linear", "exclude_modules": ["q_proj", "v_proj"]}),
    "latents": ("deepseek_v3", {"target_modules": ["q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa", "o_proj"]}),
    "classifier": ("qwen2_classify", {"target_modules": ["q_proj", "down_proj"], "task_type": "SEQ_CLS"}),
    "head_of_roberta": ("xlm_roberta_score", {"target_modules": ["query", "output.dense"], "task_type": "SEQ_CLS"}),
    "head_of_modernbert": ("modernbert_classify", {"target_modules": "all-linear", "task_type": "SEQ_CLS"}),
    "embeds": (
        "bert_embed",
        {"target_modules": ["query", "intermediate.dense", "output.dense"], "task_type": "FEATURE_EXTRACTION"},
    ),
    "tower": (
        "qwen2_5_vl",
        {"target_modules": r".*(attn\.qkv|attn\.proj|blocks\.\d\.mlp\.down_proj|merger\.mlp\.[02]|q_proj)"},
    ),
    "tower_dora": ("gemma3_seeing", {"target_modules": ["out_proj", "fc1", "q_proj"], "use_dora": True}),
}
"""Name -> the checkpoint of tests/models, and fields of LoraConfig."""

WITH_COPIES = ("tables",)
"""Those with the base's tables beside their factors, as PEFT saves them by default where it adapts tables."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases to record; all by default")
    parser.add_argument("--env", type=Path, default=OWN_ENV, help="environment with PEFT; made when missing")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        for name in arguments.names or CASES:
            record(name, *CASES[name])
        return
    python = own_environment(arguments.env)
    sys.exit(subprocess.run([python, __file__, "--inside", *arguments.names]).returncode)


def own_environment(folder: Path) -> Path:
    """The Python of an environment with PEFT; made when there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        of_torch = environment(DEFAULT_ENV)
        subprocess.run([of_torch, "-m", "venv", folder], check=True)
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        theirs, ours = (subprocess.check_output([exe, "-c", ask], text=True).strip() for exe in (of_torch, python))
        (Path(ours) / "torch.pth").write_text(theirs + "\n", encoding="utf-8")
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *PACKAGES], check=True)
    return python


def record(name: str, checkpoint: str, fields: dict[str, Any]) -> None:
    """One case: the adapter's folder, and logits in float32."""
    import numpy as np
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    sys.path.insert(0, str(ROOT))
    from tests.models import checkpoints
    from tests.models import encoder_checkpoints as encoders
    from tests.models import pooling_checkpoints as pooling
    from tests.models import seeing_checkpoints as seeing

    classifies, sees = fields.get("task_type") == "SEQ_CLS", checkpoint in seeing.SEEING
    kind = "AutoModelForSequenceClassification" if classifies else "AutoModelForCausalLM"
    kind = "AutoModelForImageTextToText" if sees else kind
    embeds = fields.get("task_type") == "FEATURE_EXTRACTION"
    kind = "AutoModel" if embeds else kind
    of_encoder = checkpoint in encoders.CHECKPOINTS
    if sees:
        numbers, pictures = seeing.pictures_of_prompts()[0], seeing.pictures_of(checkpoint)
        inputs = seeing.inputs_of(checkpoint, seeing.prompts_of(checkpoint)[0], [pictures[n] for n in numbers])
    else:
        of_text = [0, *range(7, 24), 2] if of_encoder else None
        name_of_text = pooling.CHECKPOINTS[checkpoint][0] if classifies and not of_encoder else checkpoint
        inputs = {"input_ids": np.array([of_text or checkpoints.prompt_of(name_of_text)])}
    inputs = {key: torch.from_numpy(array) for key, array in inputs.items()}
    torch.manual_seed(len(name))
    with tempfile.TemporaryDirectory() as folder:
        write = encoders.write if of_encoder else pooling.write if classifies else checkpoints.write_checkpoint
        write = seeing.write_seeing_checkpoint if sees else write
        path = write(checkpoint, Path(folder))
        base = getattr(transformers, kind).from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        fields = {"task_type": "CAUSAL_LM", **fields}
        model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, **fields)).eval()
        for key, parameter in model.named_parameters():
            if ".lora_magnitude_vector" in key:
                parameter.data *= torch.rand_like(parameter) + 0.5
            elif ".lora_" in key:
                parameter.data = torch.randn_like(parameter) * SPREAD
            elif ".modules_to_save." in key:
                parameter.data += torch.randn_like(parameter) * SPREAD
        with torch.no_grad():
            found = lambda output: output.last_hidden_state.mean(1)[0] if embeds else output.logits[0]
            logits = found(model(**inputs))
            with model.disable_adapter():
                plain = found(model(**inputs))
        save(model, GOLDEN / name, has_copies=name in WITH_COPIES)
    text = json.dumps(described(checkpoint, logits, classifies or embeds)) + "\n"
    (GOLDEN / name / "logits.json").write_text(text, encoding="utf-8")
    size = (GOLDEN / name / "adapter_model.safetensors").stat().st_size
    print(f"{name}: {size} bytes, logits differ by up to {(logits - plain).abs().max():.3f}", flush=True)


def save(model: Any, folder: Path, has_copies: bool) -> None:
    """As PEFT does, with copies of the base's tables or without; what names this machine is left out."""
    model.save_pretrained(folder, save_embedding_layers=has_copies)
    (folder / "README.md").unlink()
    path = folder / "adapter_config.json"
    given = json.loads(path.read_text(encoding="utf-8"))
    given["base_model_name_or_path"] = None
    for field in ("target_modules", "exclude_modules", "modules_to_save"):
        given[field] = sorted(given[field]) if isinstance(given[field], list) else given[field]
    path.write_text(json.dumps(given, indent=1) + "\n", encoding="utf-8")


def described(checkpoint: str, logits: Any, pools: bool) -> dict[str, Any]:
    """What is kept of logits, or of labels and vectors (`pools`)."""
    rounded = lambda values, digits: [round(value, digits) for value in values.tolist()]
    if pools:
        return {"checkpoint": checkpoint, "labels": rounded(logits, 5)}
    top = logits.topk(NUM_TOP)
    return {
        "checkpoint": checkpoint,
        "top": {
            str(position): {"ids": top.indices[position].tolist(), "logits": rounded(top.values[position], 5)}
            for position in RECORDED_POSITIONS
            if position < len(logits)
        },
        "sums": rounded(logits.double().sum(-1), 4),
    }


if __name__ == "__main__":
    main()
