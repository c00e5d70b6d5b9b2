#!/usr/bin/env python
"""What types of the KV cache save and cost: blocks and requests at equal memory, and distributions of the next token.

    python scripts/bench_kv_types.py [--model demo] [--text README.md] [--tokens 4096] [--dtype bfloat16]

Distributions are those of every token of a text, in sequences of 2048 tokens, which a model computes with each type in
chunks of 512; the divergence is from those with the model's own type (KL, in nats), and with float32 in its place for
scale. Scales of layers and heads are found in the first half of the text, and the other half is measured. Requests are
those that an engine of random weights runs at once, which has heads of 128 numbers and as much memory with each type.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from offline_bench.checkpoints import ModelShape, hf_config, write_json

from jaxpaged import LLM, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.config.cache_types import CACHE_TYPES
from jaxpaged.engine.build import find_tokenizer_folder, resolve_model
from jaxpaged.engine.input.tokenizer import load_tokenizer
from jaxpaged.kv_cache_spec import AttentionSpec
from jaxpaged.params.kv_scales import scales_file
from jaxpaged.worker.cache.attention import as_stored
from jaxpaged.worker.cache.head_scales import HeadScales, filled
from jaxpaged.worker.calibration import Calibration
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.weights import weights_of
from jaxpaged.worker.worker import meshes_of

SEQUENCE = 2048
TYPES = ["float32", *(name for name, each in CACHE_TYPES.items() if each.is_scaled)]
HEADS_OF_128 = ModelShape("heads-of-128", "llama", 2, 128, 4, 2, 128, 128, 512, False, 1e4, 2048)


class Model:
    """The model, whose parameters are read once, when they are first asked for, with a KV cache of any type."""

    def __init__(self, name: str, dtype: str, **others: Any):
        options = {"model": name, "dtype": dtype, "max_model_len": SEQUENCE, "kv_cache_dtype": "auto", **others}
        self.folder, self.model, self.decoder, self.config = resolve_model(EngineConfig.from_options(**options))
        (self.mesh,) = meshes_of(self.config.parallel)
        self.own = self.config.model.dtype

    @cached_property
    def params(self) -> Any:
        return weights_of([self.spec(self.own)], self.folder, lambda *_: None).bring_back()

    def spec(self, cache_type: str) -> EngineSpec:
        config = replace(self.config, cache=replace(self.config.cache, kv_cache_dtype=cache_type))
        return EngineSpec(config, self.model, self.decoder, self.mesh)

    def tokens(self, text: str) -> list[int]:
        return load_tokenizer(find_tokenizer_folder(self.config, self.folder)).encode(text)


class Distributions(Calibration):
    """Log probabilities of the next token behind every token, with a KV cache of the spec's type."""

    def __init__(self, engine_spec: EngineSpec, params: Any, scales: HeadScales):
        super().__init__(engine_spec, params, SEQUENCE)
        self._kv = [
            filled(kv, spec, scales, [i]) if spec.scales == "head" else kv
            for i, (kv, spec) in enumerate(zip(self._kv, self.specs))
        ]
        self._with_logits = jax.jit(self._logits, donate_argnums=3)

    def _logits(self, params: Any, tokens_C: Any, where_2: Any, kv: Any) -> Any:
        spec = self._engine_spec
        output = spec.model.forward(params, spec.decoder, self.batch(tokens_C, where_2), kv)
        logits_CV = spec.model.compute_logits(spec.model.head(params), spec.decoder, output.hidden_TD)
        return jax.nn.log_softmax(logits_CV.astype(jnp.float32)), output.kv

    def of(self, tokens: list[int]) -> np.ndarray:
        """Of whole chunks of a text."""
        found = []
        for begin in range(0, len(tokens) - self._chunk + 1, self._chunk):
            start = begin % SEQUENCE
            chunk = np.array(tokens[begin : begin + self._chunk], np.int32)
            where = np.array([start, self._chunk], np.int32)
            logprobs_CV, self._kv = self._with_logits(self._params, chunk, where, self._kv)
            found.append(np.asarray(logprobs_CV))
        return np.concatenate(found)


def scales_for(model: Model, name: str, tokens: list[int]) -> HeadScales:
    cache_type = CACHE_TYPES[name]
    if cache_type.scales != "head":
        return HeadScales()
    sequences = [tokens[i : i + SEQUENCE] for i in range(0, len(tokens), SEQUENCE)]
    largest = Calibration(model.spec(model.own), model.params, SEQUENCE).largest(sequences)
    of_type = np.float32(cache_type.largest)
    return HeadScales({layer: (k / of_type, v / of_type) for layer, (k, v) in largest.items()})


def divergence(exact_TV: np.ndarray, near_TV: np.ndarray) -> np.ndarray:
    """KL(exact || near) of each token."""
    probability_TV = np.exp(exact_TV)
    return np.where(probability_TV > 0, probability_TV * (exact_TV - near_TV), 0).sum(axis=1)


def distributions(model: Model, tokens: list[int]) -> None:
    half = len(tokens) // 2
    of_type = lambda name, scales: Distributions(model.spec(name), model.params, scales).of(tokens[half:])
    exact_TV = of_type(model.own, HeadScales())
    print(f"\n{len(exact_TV)} tokens, {model.own}        KL, mean    KL, 99 %   same first token")
    rows = [(name, scales_for(model, name, tokens[:half]), "") for name in TYPES]
    rows.insert(1, ("fp8_e4m3", HeadScales(), ", scales 1"))
    for name, scales, words in rows:
        near_TV = of_type(name, scales)
        nats_T = divergence(exact_TV, near_TV)
        same = (exact_TV.argmax(axis=1) == near_TV.argmax(axis=1)).mean()
        print(f"{name + words:24} {nats_T.mean():12.6f} {np.quantile(nats_T, 0.99):11.5f} {same:10.2%}")


def blocks() -> None:
    """Bytes of a block of one layer, 8 kv heads of 128 numbers, against bfloat16."""
    places = {"CPU, GPU": ("reference", 16), "TPU": ("tpu", 128), "TPU, small blocks": ("tpu", 32)}
    print("\nblocks in equal memory, heads of 128, against bfloat16")
    for place, (backend, block_size) in places.items():
        plain = AttentionSpec(block_size, 8, 128, 2)
        bytes_of = lambda spec, backend=backend: as_stored(spec, backend).block_bytes
        more = {name: bytes_of(plain) / bytes_of(plain.cached_as(CACHE_TYPES[name])) for name in TYPES[1:]}
        told = ", ".join(f"{name} {factor:.2f} x" for name, factor in more.items())
        print(f"{place} (blocks of {block_size}): {told}")


def requests(num_bytes: int) -> None:
    """How many run at once of requests of 512 tokens and 32 more, with so much memory for blocks."""
    print(f"\n{num_bytes >> 20} MiB for blocks        blocks   requests at once   tokens/s (2 layers, this machine)")
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder, "config.json"), hf_config(HEADS_OF_128))
        scales, of_layer = Path(folder, "scales.json"), (np.float32(0.05), np.float32(0.05))
        of_layers = dict.fromkeys(range(HEADS_OF_128.num_layers), of_layer)
        scales.write_text(scales_file("llama", "int8", of_layers), encoding="utf-8")
        for name in ("bfloat16", *TYPES[1:]):
            options = {"kv_cache_dtype": name, **({"kv_cache_scales": str(scales)} if name == "int8" else {})}
            most, num_blocks, rate = at_once(folder, num_bytes, options)
            print(f"{name:24} {num_blocks:8} {most:12} {rate:12.0f}")


def at_once(folder: str, num_bytes: int, options: dict[str, Any]) -> tuple[int, int, float]:
    with LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=num_bytes,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        token_buckets=(64, 512),
        max_model_len=1024,
        block_size=16,
        wait_for_programs=True,
        **options,
    ) as llm:
        engine, rng, most = llm.llm_engine, np.random.default_rng(0), 0
        rank = engine._core._scheduler.ranks[0]
        params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
        begin = time.monotonic()
        for i in range(64):
            engine.add_request(str(i), {"prompt_token_ids": rng.integers(3, 512, 512).tolist()}, params)
        while engine.has_unfinished_requests():
            engine.step()
            computed = [each for each in rank.running if each.num_computed_tokens >= each.num_prompt_tokens]
            most = max(most, len(computed))
        seconds = time.monotonic() - begin
        return most, engine._core.executor.kv_cache_config.num_blocks[0], 64 * 544 / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a folder or hub id")
    parser.add_argument("--text", default="README.md", help="a file; what it lacks in tokens comes from it again")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, half of them to find scales")
    parser.add_argument("--dtype", default="bfloat16", help="of weights, and of the cache that others are compared to")
    parser.add_argument("--mib", type=int, default=16, help="memory for blocks, where requests are counted")
    args = parser.parse_args()
    blocks()
    requests(args.mib << 20)
    model = Model(args.model, args.dtype)
    tokens = model.tokens(Path(args.text).read_text(encoding="utf-8"))
    distributions(model, (tokens * -(-args.tokens // len(tokens)))[: args.tokens])


if __name__ == "__main__":
    main()
