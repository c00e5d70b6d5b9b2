#!/usr/bin/env python3
"""Record what transformers computes for the tiny checkpoints of tests/models/checkpoints.py, into tests/golden/.

    scripts/update_golden.py [--env FOLDER] [NAME ...]

The suite compares with these files and needs no torch. This script makes an environment of its own with torch
(CPU) and transformers, unless FOLDER holds one already, and runs itself there. The checkpoints are remade from
their seeds, so the JSON files hold no weights: per checkpoint a few logits at some positions, the sum of the logits
at every position, and the greedy continuation.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
DEFAULT_ENV = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jaxpaged" / "golden-env"
PACKAGES = ["torch==2.13.0", "torchvision==0.28.0", "transformers==5.23.0", "numpy", "pillow"]
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

RECORDED_POSITIONS = (0, 1, 12, 25, 39)
NUM_TOP = 8
MIN_MARGIN = 1e-3
"""How far the best token must lie before the second, so that rounding cannot change a greedy continuation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="checkpoints to record; all by default")
    parser.add_argument("--env", type=Path, default=DEFAULT_ENV, help="environment with torch; made when missing")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        record_all(arguments.names)
        return
    python = environment(arguments.env)
    sys.exit(subprocess.run([python, __file__, "--inside", *arguments.names]).returncode)


def environment(folder: Path) -> Path:
    """The Python of an environment in which torch and transformers can be imported; made when there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder} with {', '.join(PACKAGES)}", file=sys.stderr)
        subprocess.run([base_python(), "-m", "venv", folder], check=True)
    if subprocess.run([python, "-c", "import torch, transformers"], capture_output=True).returncode:
        install = [python, "-m", "pip", "install", "-q", "--extra-index-url", TORCH_INDEX, *PACKAGES]
        subprocess.run(install, check=True)
    return python


def base_python() -> str:
    """A Python for which torch has wheels: 3.11 to 3.13, from the path or from pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in (11, 12, 13):
        found = [shutil.which(f"python3.{minor}"), *map(str, versions.glob(f"3.{minor}.*/bin/python"))]
        for python in filter(None, found):
            if subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
                return python
    sys.exit("No Python 3.11, 3.12 or 3.13 was found, on the path or in pyenv. Install one; torch needs it.")


def record_all(names: list[str]) -> None:
    sys.path.insert(0, str(ROOT))
    from tests.models import checkpoints

    if not names or "pooling" in names:
        golden = record_pooling()
        (GOLDEN / "pooling.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")
    if not names or "encoders" in names:
        (GOLDEN / "encoders.json").write_text(json.dumps(record_encoders()) + "\n", encoding="utf-8")
    if not names or "video_sizes" in names:
        (GOLDEN / "video_sizes.json").write_text(json.dumps(record_video_sizes()) + "\n", encoding="utf-8")
    if not names or "routed_experts" in names:
        golden = {name: record_routed_experts(checkpoints, name) for name in ROUTED}
        (GOLDEN / "routed_experts.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")
    others = {"pooling", "encoders", "video_sizes", "routed_experts", *record_seeing(names)}
    for name in [name for name in names if name not in others] or (() if names else checkpoints.CONFIGS):
        with tempfile.TemporaryDirectory() as folder:
            written = checkpoints.write_checkpoint(name, Path(folder))
            golden = record(checkpoints, name, wrapped(written, WRAPPED[name]) if name in WRAPPED else written)
        (GOLDEN / f"{name}.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")
        print(name, "margin", golden["margin"], flush=True)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2}
WRAPPED = {"muse_glimmer": {"vision_config": SMALL, "out_hidden_size": 64, "projector_hidden_size": 32}}
"""Models that transformers has only with a tower -> a description of a small one, which stays as it is made."""


def wrapped(folder: Path, tower: dict[str, Any]) -> Path:
    """The folder, with the text model of it as a part of one that sees with `tower`."""
    from safetensors.numpy import load_file, save_file

    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    whole = {name: hf[name] for name in ("architectures", "tie_word_embeddings")}
    whole |= {"model_type": hf["model_type"].removesuffix("_text"), "text_config": hf, **tower}
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    inside = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(inside, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def record(checkpoints: Any, name: str, folder: Path) -> dict[str, Any]:
    """What transformers computes for the prompt of this checkpoint, in float32."""
    import torch
    import transformers

    kind = getattr(transformers, checkpoints.CONFIGS[name]["architectures"][0])
    model, report = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = {key for key in report["missing_keys"] if name not in WRAPPED or "vision" not in key}
    assert not {*missing, *report["unexpected_keys"]}, (name, report)
    prompt = checkpoints.prompt_of(name)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
        greedy, margin = continue_greedily(model, prompt, checkpoints.NUM_GREEDY)
    assert margin > MIN_MARGIN, f"{name}: tokens only {margin} apart; change its entry in SALTS"
    top = logits.topk(NUM_TOP)
    return {
        "top": {
            str(position): {
                "ids": top.indices[position].tolist(),
                "logits": [round(value, 5) for value in top.values[position].tolist()],
            }
            for position in RECORDED_POSITIONS
        },
        "sums": [round(value, 4) for value in logits.double().sum(-1).tolist()],
        "greedy": greedy,
        "margin": round(margin, 4),
    }


ROUTED = ("mixtral", "qwen3_moe", "deepseek_v3")
"""Checkpoints of which the experts of a prompt's tokens are recorded."""


def record_routed_experts(checkpoints: Any, name: str) -> list[list[list[int]]]:
    """The experts of each token of the prompt in each layer that has some, in the order of their numbers."""
    import torch
    from transformers import AutoModelForCausalLM

    chosen: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        written = checkpoints.write_checkpoint(name, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32, attn_implementation="eager")
    for path, module in model.named_modules():
        if path.endswith(".experts"):
            module.register_forward_pre_hook(lambda _, given: chosen.append(given[1].sort(dim=-1).values))
    with torch.no_grad():
        model(torch.tensor([checkpoints.prompt_of(name)]))
    return torch.stack(chosen, dim=1).tolist()


def record_seeing(names: list[str]) -> list[str]:
    """Record those of the checkpoints that see, or all where there are no names. Returns all of their names."""
    from tests.models import seeing_checkpoints as seeing

    for name in [name for name in seeing.SEEING if name in names or not names]:
        with tempfile.TemporaryDirectory() as folder:
            golden = seen(name, seeing.write_seeing_checkpoint(name, Path(folder)))
        (GOLDEN / f"{name}.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")
        print(name, flush=True)
    return list(seeing.SEEING)


def seen(name: str, folder: Path) -> dict[str, Any]:
    """Of a checkpoint that sees: sums and first numbers of its pictures' embeddings, and logits of its prompts."""
    import torch
    from transformers import AutoModelForImageTextToText

    from tests.models import seeing_checkpoints as seeing

    model, report = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not {*report["missing_keys"], *report["unexpected_keys"]}, (name, report)
    pictures, embeds, prompts = seeing.pictures_of(name), [], []
    with torch.no_grad():
        for picture in pictures:
            output = model.get_image_features(**tensors_of(seeing.features_of(name, [picture])))
            levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
            joined = [torch.cat(list(x)) if isinstance(x, list | tuple) else x.flatten(0, -2) for x in levels]
            found = torch.cat(joined, dim=-1)
            embeds.append({"sums": rounded(found.double().sum(-1)), "first": rounded(found[:, 0])})
        for prompt, numbers in zip(seeing.prompts_of(name), seeing.pictures_of_prompts(), strict=True):
            inputs = tensors_of(seeing.inputs_of(name, prompt, [pictures[number] for number in numbers]))
            prompts.append(logits_of(model, inputs))
        golden = {"embeds": embeds, "prompts": prompts}
        if name in seeing.qwen.TIMES:
            golden["video"] = logits_of(model, tensors_of(seeing.video_inputs_of(name)))
    return golden


def logits_of(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Of every token: the sum of its logits, and the largest ones."""
    logits = model(**inputs).logits[0]
    top = logits.topk(NUM_TOP)
    return {
        "sums": [round(value, 4) for value in logits.double().sum(-1).tolist()],
        "ids": top.indices.tolist(),
        "logits": [rounded(row) for row in top.values],
    }


def tensors_of(arrays: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def record_video_sizes() -> dict[str, Any]:
    """Heights and widths that videos are resized to, and the times of their moments in words."""
    from transformers.models.qwen2_vl import video_processing_qwen2_vl as second
    from transformers.models.qwen3_vl import processing_qwen3_vl, video_processing_qwen3_vl

    from tests.multimodal.processors import video_cases

    third, timed = video_processing_qwen3_vl, processing_qwen3_vl.Qwen3VLProcessor
    sizes: dict[str, list[list[int]]] = {"qwen2_5_vl": [], "qwen3_vl": []}
    for frames, width, height, fewest, most in video_cases.sizes():
        sizes["qwen2_5_vl"].append(list(second.smart_resize(height, width, 28, fewest, most)))
        sizes["qwen3_vl"].append(list(third.smart_resize(frames, height, width, 2, 32, fewest, most)))
    times = [timed._calculate_timestamps(None, list(indices), fps) for indices, fps in video_cases.times()]
    return {"sizes": sizes, "times": [[f"{each:.1f}" for each in own] for own in times]}


def record_pooling() -> dict[str, Any]:
    """What the checkpoints of tests/models/pooling_checkpoints.py give for each of their prompts, in float32."""
    from tests.models import pooling_checkpoints as pooling

    golden: dict[str, Any] = {}
    for name in pooling.CHECKPOINTS:
        with tempfile.TemporaryDirectory() as folder:
            golden[name] = [pooled(pooling.write(name, Path(folder)), ids) for ids in pooling.prompts(name)]
        print(name, flush=True)
    return golden


def record_encoders() -> dict[str, Any]:
    """What those of tests/models/encoder_checkpoints.py give: rerankers for pairs of texts, others for texts."""
    from tests.models import encoder_checkpoints as encoders

    golden: dict[str, Any] = {}
    for name, hf in encoders.CHECKPOINTS.items():
        given = encoders.PAIRS if name.endswith("score") else [(text,) for text in encoders.TEXTS]
        with tempfile.TemporaryDirectory() as folder:
            written = encoders.write(name, Path(folder))
            golden[name] = [pooled(written, *encoders.tokens_of(hf, *texts)) for texts in given]
        print(name, flush=True)
    return golden


def pooled(folder: Path, prompt: list[int], types: list[int] | None = None) -> dict[str, list[float]]:
    """The logits of a classifier, or the last, the first and the mean hidden state, not normalised. `types`: which text
    of a pair each token is of."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    classifies = AutoConfig.from_pretrained(folder).architectures[0].endswith("ForSequenceClassification")
    kind = AutoModelForSequenceClassification if classifies else AutoModel
    model, report = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not {*report["missing_keys"], *report["unexpected_keys"]}, report
    kinds = {"token_type_ids": torch.tensor([types])} if types and any(types) else {}
    with torch.no_grad():
        output = model(torch.tensor([prompt]), **kinds)
    if classifies:
        return {"logits": rounded(output.logits[0])}
    hidden = output.last_hidden_state[0]
    return {"LAST": rounded(hidden[-1]), "CLS": rounded(hidden[0]), "MEAN": rounded(hidden.double().mean(0))}


def rounded(values: Any) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def continue_greedily(model: Any, prompt: list[int], count: int) -> tuple[list[int], float]:
    """The greedy continuation and the smallest lead of a chosen token; the whole text is computed every time."""
    import torch

    tokens, margin = list(prompt), float("inf")
    for _ in range(count):
        best = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], margin


if __name__ == "__main__":
    main()
