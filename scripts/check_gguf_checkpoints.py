#!/usr/bin/env python3
"""See that llama.cpp computes with the GGUF files of the tests what transformers computes with the checkpoints.

    scripts/check_gguf_checkpoints.py [--env FOLDER] [NAME ...]

tests/params/gguf_folder writes such files itself, and compares what is made of them with the checkpoints. Whether they
are files as llama.cpp has them only llama.cpp can say: this script prints the largest difference of log
probabilities of the next token, of several prompts, and fails above 0.02. llama.cpp comes with xllamacpp.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from update_format_goldens import OWN_ENV, ROOT, own_environment

MAX_DIFFERENCE = 0.02
LENGTHS = (5, 14, 24, 40)
"""Tokens of the prompts; windows of the checkpoints are shorter than the last one."""
OTHERS = {
    "phi3": "llama.cpp has no windows for Phi-3",
    "exaone4": "llama.cpp has windows in EXAONE 4 of 64 layers only",
    "deepseek_v2": "llama.cpp expects latents of queries but in models of V2-Lite's 27 layers",
    "mimo_v2": "llama.cpp's windows of MiMo-V2 are one token shorter than the publisher's",
}
"""Checkpoints of which llama.cpp computes something else."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="checkpoints; all of the tests by default")
    parser.add_argument("--env", type=Path, default=OWN_ENV, help="environment with the libraries; made when missing")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        sys.exit(compare(arguments.inside))
    python = own_environment(arguments.env)
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), arguments.names)
        sys.exit(subprocess.run([python, __file__, "--inside", folder]).returncode)


def write_models(folder: Path, names: list[str]) -> None:
    """Each as a GGUF file with a tokenizer of nothing but numbers, as a checkpoint, and its prompts."""
    import numpy as np

    sys.path.insert(0, str(ROOT))
    from tests.params.gguf_folder.gguf_checkpoints import (
        attention_factor,
        config_of,
        write_gguf_checkpoint,
        write_hf_checkpoint,
    )
    from tests.params.gguf_folder.test_architectures import NAMES

    for name in names or [name for name in (*NAMES, "llama3") if name not in OTHERS]:
        hf = config_of(name)
        vocab_size = hf["vocab_size"]
        tokenizer = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [f"t{i}" for i in range(vocab_size)],
            "tokenizer.ggml.token_type": np.ones(vocab_size, np.int32),
            "tokenizer.ggml.merges": ["t 1"],
        }
        write_gguf_checkpoint(name, folder / f"{name}.gguf", {**tokenizer, **attention_factor(hf)})
        write_hf_checkpoint(name, folder / name)
        random = np.random.default_rng(0)
        least = hf.get("original_max_position_embeddings", 0) if name.endswith("_long") else 0
        lengths = [length for length in LENGTHS if least < length < hf["max_position_embeddings"]]
        prompts = [random.integers(3, vocab_size, length).tolist() for length in lengths]
        (folder / f"{name}.json").write_text(json.dumps(prompts), encoding="utf-8")


def compare(folder: Path) -> int:
    """The exit status."""
    worst = 0.0
    for path in sorted(folder.glob("*.gguf")):
        prompts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        expected = of_transformers(folder / path.stem, prompts)
        found = of_llama_cpp(path, prompts, len(expected[0]))
        difference = max(
            abs(theirs[token] - ours) for theirs, of_prompt in zip(expected, found) for token, ours in of_prompt.items()
        )
        worst = max(worst, difference)
        print(f"{path.stem:28} {difference:.5f}", flush=True)
    return int(not worst < MAX_DIFFERENCE)


def of_transformers(folder: Path, prompts: list[list[int]]) -> list[list[float]]:
    """Log probabilities of all tokens behind each prompt."""
    import torch
    import transformers

    (name,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    found = getattr(transformers, name)
    model = found.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).tolist() for prompt in prompts]


def of_llama_cpp(path: Path, prompts: list[list[int]], vocab_size: int) -> list[dict[int, float]]:
    """The same, by token."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 64, 1, False, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    options = {"n_predict": 1, "logprobs": vocab_size, "temperature": 0, "samplers": ["temperature"]}
    found = []
    for prompt in prompts:
        answer: Any = server.handle_completions({"prompt": prompt, **options})
        answer = json.loads(answer) if isinstance(answer, str) else answer
        (token,) = answer["choices"][0]["logprobs"]["content"]
        found.append({each["id"]: each["logprob"] for each in token["top_logprobs"]})
    return found


if __name__ == "__main__":
    main()
