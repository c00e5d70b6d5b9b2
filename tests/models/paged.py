"""Runs one model over one prompt with a paged cache, in chunks, the way the engine does, but without an engine.

The blocks of the request are scattered over the pool; layers with a window share a table with the others, since
what a window may forget is the scheduler's business.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.engine.build import with_settled_quantization
from jaxpaged.layers.attention import AttentionContext
from jaxpaged.models.config import load_hf_config
from jaxpaged.models.interface import Batch
from jaxpaged.models.registry import model_for
from jaxpaged.params.checkpoint import load_params
from jaxpaged.params.forms import Device, formed_specs, shards_of
from jaxpaged.params.quantized import quantized_specs
from jaxpaged.worker.cache.kinds import kind_of, tensor_struct
from jaxpaged.worker.step.packed import StepParts
from pallas_kernels.ragged_paged_attention import choose_backend
from tests.models.checkpoints import CONFIGS

GOLDEN = Path(__file__).parent.parent / "golden"
BLOCK_SIZE = 8
NUM_BLOCKS = 12
CHUNK = 16
BACKEND = "reference" if jax.default_backend() == "cpu" else choose_backend("auto", jax.default_backend())
TABLE = np.array([7, 2, 9, 4, 11, 1, 8], np.int32)
"""The blocks of the only request, in an order that is not theirs."""


def golden_of(name: str) -> dict[str, Any]:
    """What transformers computed: see scripts/update_golden.py."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


class PagedModel:
    """A checkpoint on `num_shards` devices; `logits` feeds tokens and returns their logits."""

    def __init__(
        self,
        folder: Path,
        num_shards: int = 1,
        max_model_len: int | None = None,
        quantization: str | None = None,
        spreads_experts: bool = False,
        form: str = "16bit",
        platform: str | None = None,
    ):
        """`form` is that of a quantised checkpoint's weights, as one that runs on `platform` would have them."""
        hf = load_hf_config(folder)
        self.model = model_for(hf)
        config = self.model.config_from_hf(hf)
        if config.quantization is not None:
            config = with_settled_quantization(self.model, config, folder)
        self.config = dataclasses.replace(config, max_model_len=max_model_len or config.max_model_len)
        self.mesh = make_mesh(num_shards, spreads_experts=spreads_experts)
        self.context = AttentionContext(self.mesh, BACKEND)
        specs = quantized_specs(self.model.param_specs(self.config, num_shards), quantization, self.config.dim_sizes())
        shards, kernel_for = shards_of(self.mesh.shape), lambda *form: "reference"
        device = Device(platform or jax.default_backend(), kernel_for, shards)
        specs = formed_specs(specs, form, self.config.dim_sizes(), device)
        self.param_specs = specs
        self.params = load_params(specs, self.config, folder, self.mesh, jnp.float32)
        self.specs = self.model.attention_specs(self.config, BLOCK_SIZE, 4, num_shards)
        structs = [tensor_struct(self.context, spec, NUM_BLOCKS, jnp.float32, num_rows=2) for spec in self.specs]
        zeros = lambda struct: jax.device_put(np.zeros(struct.shape, struct.dtype), struct.sharding)
        self.kv = jax.tree.map(zeros, structs)
        self.groups = list(dict.fromkeys(self.specs))
        self.num_computed = 0

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        return jax.jit(self._step, donate_argnames="kv").lower(
            self.params, np.zeros(CHUNK, np.int32), np.int32(0), np.int32(0), self.kv
        )

    @functools.cached_property
    def program(self) -> jax.stages.Compiled:
        return self.lowered.compile()

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Logits [len(tokens), V] of tokens that follow those given before."""
        parts = [self._chunk(tokens[i : i + CHUNK]) for i in range(0, len(tokens), CHUNK)]
        return np.concatenate(parts)[:, : self.config.vocab_size]

    def continue_greedily(self, logits_V: np.ndarray, count: int) -> list[int]:
        """The greedy continuation, from the logits of the last token given."""
        tokens = [int(logits_V.argmax())]
        while len(tokens) < count:
            tokens.append(int(self.logits(tokens[-1:])[-1].argmax()))
        return tokens

    def _chunk(self, tokens: list[int]) -> np.ndarray:
        padded = np.zeros(CHUNK, np.int32)
        padded[: len(tokens)] = tokens
        logits_TV, self.kv = self.program(
            self.params, padded, np.int32(len(tokens)), np.int32(self.num_computed), self.kv
        )
        self.num_computed += len(tokens)
        return np.asarray(logits_TV)[: len(tokens)]

    def _step(self, params, tokens_T, num_tokens, num_computed, kv):
        positions_T = num_computed + jnp.arange(CHUNK)
        starts = jnp.array([0, num_tokens, num_tokens])
        seq_lens = jnp.array([num_computed + num_tokens, 0])
        tables = jnp.stack([TABLE, np.zeros_like(TABLE)])
        parts = StepParts(jnp.array([1]), jnp.arange(2), starts, seq_lens, tokens_T, *[None] * 8)
        settings = {"num_tokens": CHUNK, "decodes_only": False, "shared_6R": None, "visible_end_T": None}
        attention = [kind_of(spec).step_batch(self.context, spec, parts, tables, **settings) for spec in self.groups]
        caches = tuple((self.groups.index(spec), i) for i, spec in enumerate(self.specs))
        batch = Batch(tokens_T, positions_T, tuple(attention), caches)
        output = self.model.forward(params, self.config, batch, kv)
        return self.model.compute_logits(self.model.head(params), self.config, output.hidden_TD), output.kv


def max_model_len_of(name: str) -> int | None:
    """The limit under which the two length-dependent scalings agree with transformers for the recorded prompt."""
    return {"llama_dynamic": 40, "phi3_longrope_short": 64}.get(name)


NAMES = list(CONFIGS)
