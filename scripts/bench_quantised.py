#!/usr/bin/env python
"""What formats of checkpoints cost and lose: loading, memory, speed on a CPU, and distributions of the next token.

    python scripts/bench_quantised.py [--formats gptq,awq] [--forms rows,16bit] [--tokens 2048] [--layers 16]

Two models are written in every format, by the packers of the tests: the embedded one, and one of random weights (a
decoder of 1,536 columns, `--layers` of them, 0.46 billion weights). Each is measured in a process of its own.

Of the large one: seconds of CPU time and bytes of the file for each of them, the most memory beyond what its process
had before, over the bytes of its parameters, and these over the file's. Of the embedded one: tokens for a second of
CPU time of all threads, of one request (decode) and of a prompt of 512 (prefill), over those in bfloat16; and the
divergence from the 16-bit model's distributions (KL, in nats) behind every token of README.md, beside that of a 16-bit
checkpoint that holds what the format stands for. What is between the two is ours.
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from offline_bench.checkpoints import ModelShape, hf_config

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

GROUP = {"gptq": 128, "gptq symmetric": 128, "gptq v2 8 bits": 128, "gptq shuffled": 128, "awq": 128, "w4a16": 128}
"""Of formats that have groups of any size: those that people download."""
BLOCK = (128, 128)
FORMATS = ("gptq symmetric", "gptq shuffled", "awq", "w4a16", "w8a8", "float-quantized", "fp8 blocks", "nvfp4", "mxfp4")
PLAIN = "bfloat16"
LARGE = ModelShape("large", "llama", 16, 1536, 12, 4, 128, 4096, 32_000, True, 1e4, 2048)
PREFILL, DECODE = 512, 64
"""Tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS), help="names of tests/models/quantised_checkpoints.py")
    parser.add_argument("--forms", default="rows,16bit", help="--quantized-form of the embedded model")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text; a multiple of 512")
    parser.add_argument("--layers", type=int, default=LARGE.num_layers, help="of the large model; 0: leave it out")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(MEASUREMENTS[arguments.measure](json.load(sys.stdin))))
        return
    names = [name for name in arguments.formats.split(",") if name]
    with tempfile.TemporaryDirectory() as folder:
        if arguments.layers:
            loading(Path(folder), names, arguments.layers)
        serving(Path(folder), names, arguments.forms.split(","), arguments.tokens)


# ---- loading -------------------------------------------------------------------------------------


def loading(folder: Path, names: list[str], num_layers: int) -> None:
    hf = hf_config(dataclasses.replace(LARGE, num_layers=num_layers))
    print(
        f"{'large model':18} {'file MB':>8} {'CPU s':>6} {'GB/s':>5} {'peak / params':>14} {'params / file':>14}   form"
    )
    for name in (PLAIN, *names):
        model = folder / "large"
        write_large(model, name, hf)
        for form in ("auto",) if name == PLAIN else ("16bit", "rows", "stored"):
            found = measured("load", {"model": str(model), "quantized_form": form})
            size = (model / "model.safetensors").stat().st_size
            print(
                f"{name:18} {size / 1e6:8.0f} {found['seconds']:6.2f} {size / found['seconds'] / 1e9:5.2f} "
                f"{found['peak'] / found['params']:14.2f} {found['params'] / size:14.2f}   {form}",
                flush=True,
            )
        shutil.rmtree(model)


def write_large(folder: Path, name: str, hf: dict[str, Any]) -> None:
    """Every matrix of one shape has the same tensors, which are packed once."""
    from tests.models.quantised_checkpoints import is_linear, write
    from tests.models.tensor_shapes import tensor_shapes

    rng, made, tensors = np.random.default_rng(0), {}, {}
    for tensor, shape in tensor_shapes(hf).items():
        if shape not in made:
            weight = (rng.standard_normal(shape) * 0.02).astype(np.float32)
            made[shape] = weight, packed(name, weight) if is_linear(tensor) and name != PLAIN else None
        weight, own = made[shape]
        if is_linear(tensor) and own is not None:
            tensors |= {tensor.removesuffix("weight") + end: one for end, one in own[0].items()}
        else:
            tensors[tensor] = in_16_bits(weight)
    folder.mkdir()
    write(folder, tensors, described(name, hf))


def in_16_bits(weight: np.ndarray) -> np.ndarray:
    import ml_dtypes

    return weight.astype(ml_dtypes.bfloat16)


def packed(name: str, weight_OI: np.ndarray) -> Any:
    """(tensors of a matrix, what they stand for)."""
    from tests.models.quantised_checkpoints import FORMATS as PACKERS

    pack, options, _ = PACKERS[name]
    changes: dict[str, Any] = {"group": GROUP[name]} if name in GROUP else {}
    changes |= {"block": BLOCK} if options.get("scale") == "block" else {}
    return pack(weight_OI, **(options | changes))


def described(name: str, hf: dict[str, Any]) -> dict[str, Any]:
    """config.json of the model in a format."""
    from tests.models.quantised_checkpoints import FORMATS as PACKERS

    if name == PLAIN:
        return hf
    given = json.loads(json.dumps(PACKERS[name][2]))
    if name in GROUP:
        of_weights = given["config_groups"]["group_0"]["weights"] if "config_groups" in given else given
        of_weights["q_group_size" if "q_group_size" in of_weights else "group_size"] = GROUP[name]
    if "weight_block_size" in given:
        given["weight_block_size"] = list(BLOCK)
    return {**hf, "quantization_config": given}


# ---- serving -------------------------------------------------------------------------------------


def serving(folder: Path, names: list[str], forms: list[str], num_tokens: int) -> None:
    """The embedded model, whose 16-bit form is the measure of speed and of distributions."""
    plain = folder / "plain.npy"
    base = measured("serve", {"model": "demo", "tokens": num_tokens, "logprobs": str(plain)})
    print(f"\n{'embedded model':18} {'decode':>7} {'prefill':>8} {'KL':>9} {'KL of the format':>17} {'ours':>9}   form")
    int8 = measured("serve", {"model": "demo", "tokens": num_tokens, "quantization": "int8", "than": str(plain)})
    rows = [(PLAIN, "int8 of it", int8, float("nan"))]
    for name in names:
        model, of_format = folder / "small", folder / "of_format"
        write_small(model, of_format, name)
        alone = measured("serve", {"model": str(of_format), "tokens": num_tokens, "than": str(plain)})
        for form in forms:
            options = {"model": str(model), "quantized_form": form, "tokens": num_tokens, "than": str(plain)}
            rows.append((name, form, measured("serve", options), alone["nats"]))
        for each in (model, of_format):
            shutil.rmtree(each)
    for name, form, found, nats in rows:
        print(
            f"{name:18} {found['decode'] / base['decode']:7.2f} {found['prefill'] / base['prefill']:8.2f} "
            f"{found['nats']:9.5f} {nats:17.5f} {found['nats'] - nats:9.5f}   {form}",
            flush=True,
        )


def write_small(folder: Path, of_format: Path, name: str) -> None:
    """The embedded model in a format, and in 16 bits that hold what the format stands for."""
    from jaxpaged.params.hub import EMBEDDED_FOLDER
    from tests.models.quantised_checkpoints import is_linear, read, write

    stored, exact = {}, {}
    for tensor, weight in read(EMBEDDED_FOLDER / "model.safetensors").items():
        if is_linear(tensor):
            own, meant = packed(name, weight.astype(np.float32))
            stored |= {tensor.removesuffix("weight") + end: one for end, one in own.items()}
            exact[tensor] = in_16_bits(meant)
        else:
            stored[tensor] = exact[tensor] = weight
    hf = json.loads((EMBEDDED_FOLDER / "config.json").read_text(encoding="utf-8"))
    for each, tensors, config in ((folder, stored, described(name, hf)), (of_format, exact, hf)):
        shutil.copytree(EMBEDDED_FOLDER, each, ignore=shutil.ignore_patterns("*.safetensors"))
        write(each, tensors, config)


# ---- in a process of its own ---------------------------------------------------------------------


def measured(what: str, options: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", what]
    done = subprocess.run(command, input=json.dumps(options), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{options}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def load(options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of CPU time, and bytes."""
    import jax
    from bench_kv_types import Model

    model = Model(options.pop("model"), "bfloat16", skip_tokenizer_init=True, **options)
    jax.numpy.zeros(8).block_until_ready()
    before, begin = resident("VmRSS"), time.process_time()
    params = jax.block_until_ready(model.params)
    seconds = time.process_time() - begin
    num_bytes = sum(leaf.on_device_size_in_bytes() for leaf in jax.tree.leaves(params))
    return {"seconds": seconds, "peak": resident("VmHWM") - before, "params": num_bytes}


def resident(name: str) -> int:
    """Bytes of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def serve(options: dict[str, Any]) -> dict[str, Any]:
    """Tokens for a second of CPU time, and nats."""
    from bench_kv_types import SEQUENCE, Distributions, Model, divergence

    from jaxpaged import LLM, SamplingParams
    from jaxpaged.worker.cache.head_scales import HeadScales

    name, num_tokens = options.pop("model"), options.pop("tokens")
    than, logprobs = options.pop("than", None), options.pop("logprobs", None)
    model = Model(name, "bfloat16", **options)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tokens = model.tokens(text)[:num_tokens]
    found_TV = Distributions(model.spec(model.own), model.params, HeadScales()).of(tokens)
    if logprobs:
        np.save(logprobs, found_TV)
    nats = divergence(np.load(than), found_TV).mean() if than else 0.0
    del model
    engine = LLM(name, max_model_len=SEQUENCE // 2, max_num_seqs=1, enable_prefix_caching=False, **options)
    seconds = {}
    for what, length, count in (("prefill", PREFILL, 1), ("decode", 8, DECODE)):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        prompt = {"prompt_token_ids": tokens[:length]}
        engine.generate(prompt, params)
        best = float("inf")
        for _ in range(5):
            begin = time.process_time()
            engine.generate(prompt, params)
            best = min(best, time.process_time() - begin)
        seconds[what] = best
    return {"nats": float(nats), "prefill": PREFILL / seconds["prefill"], "decode": DECODE / seconds["decode"]}


MEASUREMENTS = {"load": load, "serve": serve}

if __name__ == "__main__":
    main()
