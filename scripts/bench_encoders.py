#!/usr/bin/env python3
"""Embeddings per second of an encoder, beside transformers on the same weights, both on this machine's CPU.

    python scripts/bench_encoders.py [--texts 256] [--length 100] [--dtypes float32 bfloat16] [--peer PYTHON]

The model has all-MiniLM's shape and random weights; texts are random tokens, half to one and a half times as many as
`--length`. Each engine is a process of its own and takes the best of three passes, in tokens per second of CPU time, so
that others on the machine count less. PYTHON is an environment with torch and transformers, such as the one that
scripts/update_golden.py makes; it gets batches of 32 texts, sorted by length.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--peer", help="a Python with torch and transformers")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        engine, folder, dtype = arguments.inside
        texts = random_texts(arguments.texts, arguments.length)
        print(json.dumps({"jaxpaged": ours, "transformers": theirs}[engine](folder, dtype, texts)))
        return
    pythons = {"jaxpaged": sys.executable} | ({"transformers": arguments.peer} if arguments.peer else {})
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for dtype in arguments.dtypes:
            for engine, python in pythons.items():
                sizes = ["--texts", str(arguments.texts), "--length", str(arguments.length)]
                command = [python, __file__, *sizes, "--inside", engine, folder, dtype]
                said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
                print(f"{dtype:9} {engine:13} {json.loads(said.splitlines()[-1]):8,.0f} tokens a second of CPU time")


def write_model(folder: Path) -> None:
    from safetensors.numpy import save_file

    from tests.models import encoder_checkpoints as encoders

    hf, rng = {**encoders.BERT, **SHAPE}, np.random.default_rng(0)
    tensors = {name: encoders.noise(rng, name, shape) for name, shape in encoders.shapes(hf).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    encoders.tokenizer_of(hf).save(str(folder / "tokenizer.json"))


def random_texts(count: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(5, 30_000, size).tolist() for size in rng.integers(length // 2, length * 3 // 2, count)]


def best_rate(run: Callable[[], object], texts: list[list[int]]) -> float:
    """Tokens per second of CPU time, after one pass that does not count."""
    run()
    rates = []
    for _ in range(3):
        begin = time.process_time()
        run()
        rates.append(sum(map(len, texts)) / (time.process_time() - begin))
    return max(rates)


def ours(folder: str, dtype: str, texts: list[list[int]]) -> float:
    from jaxpaged import LLM

    prompts = [{"prompt_token_ids": ids} for ids in texts]
    with LLM(folder, dtype=dtype) as llm:
        llm.wait_for_programs()
        return best_rate(lambda: llm.embed(prompts, use_tqdm=False), texts)


def theirs(folder: str, dtype: str, texts: list[list[int]]) -> float:
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    by_length = sorted(texts, key=len)

    def run() -> None:
        for i in range(0, len(texts), BATCH):
            batch = by_length[i : i + BATCH]
            longest = max(map(len, batch))
            ids = torch.tensor([text + [0] * (longest - len(text)) for text in batch])
            mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in batch])
            with torch.inference_mode():
                model(ids, attention_mask=mask)

    return best_rate(run, texts)


if __name__ == "__main__":
    main()
