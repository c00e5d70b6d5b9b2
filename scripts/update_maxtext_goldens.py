#!/usr/bin/env python
"""Hold the mapping "maxtext" to MaxText itself, and record trees that it has: tests/golden/maxtext_trees.json.

    JAX_PLATFORMS=cpu python scripts/update_maxtext_goldens.py [NAME ...]

Needs an environment with jaxpaged and MaxText 0.2.5 (`pip install --no-deps maxtext`, then what its modules import).
Tiny models are made by MaxText's own code, with layers one by one and scanned, and get a random checkpoint's weights by
the mapping. Their log probabilities must be those of an engine with this checkpoint, and those of the engine after it
took the model's own parameters. Of each array the name, the shape and a number for its contents are recorded.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flax.linen
import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, model_creation_utils
from safetensors.numpy import save_file

from jaxpaged import LLM
from jaxpaged.params.framework_trees import Named, flat, named_tensors, tree_of
from tests.models.checkpoints import GEMMA2, GEMMA3, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, random_tensors
from tests.models.tensor_shapes import tensor_shapes
from tests.params.test_framework_trees import MAXTEXT_TREES, print_of

ENGINE = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 20, "skip_tokenizer_init": True}
LARGEST_DIFFERENCE = 3e-5
ROWS, COLUMNS = 2, 24
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EPSILON = {"rms_norm_eps": 1e-6}  # of MaxText's Gemma layers, whatever options say
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24, "base_mlp_dim": 24}
WINDOW = {"sliding_window_size": 9}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama3-8b", {}, LLAMA),
    "llama3.1": ("llama3.1-8b", {}, {**LLAMA, "rope_scaling": LLAMA3_ROPE}),
    "mistral": ("mistral-7b", {}, {**MISTRAL, "sliding_window": None}),
    "qwen2": ("qwen2.5-1.5b", {}, QWEN2),
    "qwen3": ("qwen3-0.6b", {}, QWEN3),
    "qwen3_moe": (
        "qwen3-30b-a3b",
        EXPERTS,
        {**QWEN3_MOE, "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": []},
    ),
    "mixtral": (
        "mixtral-8x7b",
        EXPERTS,
        {**MIXTRAL, "num_local_experts": 6, "intermediate_size": 24, "rope_theta": 10000.0},
    ),
    "gemma2": (
        "gemma2-2b",
        {**WINDOW, "base_num_decoder_layers": 2},
        {**GEMMA2, **EPSILON, "num_hidden_layers": 4, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 50.0},
    ),
    "gemma3": (
        "gemma3-4b",
        {**WINDOW, "base_num_decoder_layers": 8, "rope_linear_scaling_factor": 1.0},
        {
            **GEMMA3,
            **EPSILON,
            "num_hidden_layers": 8,
            "sliding_window_pattern": 6,
            "sliding_window": 9,
            "query_pre_attn_scalar": 12,
        },
    ),
}
"""Name -> MaxText's model, its options, and config.json of the same."""


def options_of(hf: dict[str, Any]) -> dict[str, Any]:
    """MaxText's options for a config.json."""
    head_dim = hf.get("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
    return {
        "base_emb_dim": hf["hidden_size"],
        "base_mlp_dim": hf["intermediate_size"],
        "base_num_query_heads": hf["num_attention_heads"],
        "base_num_kv_heads": hf["num_key_value_heads"],
        "base_num_decoder_layers": hf["num_hidden_layers"],
        "head_dim": head_dim,
        "vocab_size": hf["vocab_size"],
        "rope_max_timescale": int(hf.get("rope_theta", 10_000)),
        "local_rope_max_timescale": int(hf.get("rope_local_base_freq", 0)),
        "normalization_layer_epsilon": hf["rms_norm_eps"],
        "logits_via_embedding": hf["tie_word_embeddings"],
        "final_logits_soft_cap": hf.get("final_logit_softcapping", 0.0),
    }


class MaxTextModel:
    """A model of MaxText in float32, made by its code."""

    def __init__(self, name: str, options: dict[str, Any]):
        self.config = pyconfig.initialize(
            ["", str(Path(maxtext.__file__).parent / "configs" / "base.yml")],
            model_name=name,
            override_model_config=True,
            run_name="tree",
            per_device_batch_size=ROWS,
            max_target_length=COLUMNS,
            dtype="float32",
            weight_dtype="float32",
            attention="dot_product",
            sparse_matmul=False,
            enable_checkpointing=False,
            skip_jax_distributed_system=True,
            **options,
        )
        self.mesh = maxtext_utils.get_mesh_from_config(self.config)
        with self.mesh, flax.linen.logical_axis_rules(self.config.logical_axis_rules):
            self.module = model_creation_utils.from_config(self.config, mesh=self.mesh, rngs=nnx.Rngs(0))

    def take(self, tree: dict[str, Any]) -> None:
        state = nnx.state(self.module, nnx.Param)
        nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, tree))
        nnx.update(self.module, state)

    def logprobs(self, tokens_RC: np.ndarray) -> np.ndarray:
        """Of each token but the first."""
        places = np.broadcast_to(np.arange(tokens_RC.shape[1]), tokens_RC.shape)
        with self.mesh, flax.linen.logical_axis_rules(self.config.logical_axis_rules):
            logits = self.module(tokens_RC, places, jnp.ones_like(tokens_RC), enable_dropout=False)
        logprobs = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)))[:, :-1]
        return np.take_along_axis(logprobs, tokens_RC[:, 1:, None], -1)[..., 0]


def compare(name: str, hf: dict[str, Any], model: MaxTextModel, stacked: bool) -> dict[str, Any]:
    """The tree of a random checkpoint, which MaxText and the engine compute alike."""
    tensors = random_tensors(tensor_shapes(hf), hf, seed=1)
    tokens_RC = np.random.default_rng(2).integers(3, hf["vocab_size"], (ROWS, COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf), encoding="utf-8")
        save_file(tensors, Path(folder, "model.safetensors"))
        with LLM(folder, max_num_seqs=ROWS, **ENGINE) as llm:
            [stage] = llm.collective_rpc(lambda worker: worker.stages)[0]
            named = Named.of(stage.decoder, jax.tree.leaves(stage.specs))
            tree = tree_of(tensors, "maxtext", named, stacked)
            given = jax.tree.map(np.copy, tree)
            table = given["token_embedder"]["embedding"]
            table[:] = table.astype(jnp.bfloat16)  # as MaxText's head rounds it, where the two are one
            model.take(given)
            trained = model.logprobs(tokens_RC)
            for weights, mapping in ((named_tensors(given, "maxtext", named), None), (model.module, "maxtext")):
                llm.update_weights(weights, mapping=mapping)
                scored = llm.score_tokens(
                    [{"prompt_token_ids": row[:1].tolist()} for row in tokens_RC], tokens_RC[:, 1:], use_tqdm=False
                )
                apart = np.abs(np.array(scored) - trained).max()
                print(f"{name}, {'scanned' if stacked else 'one by one'}: log p {apart:.1e} apart", flush=True)
                assert apart < LARGEST_DIFFERENCE, "MaxText and the engine do not have the same weights"
    found = {path: array.shape for path, array in flat(model.module).items()}
    assert found == {path: array.shape for path, array in flat(tree).items()}
    return {path: [list(array.shape), print_of(array)] for path, array in flat(tree).items()}


def main() -> None:
    recorded = json.loads(MAXTEXT_TREES.read_text(encoding="utf-8"))
    for name in sys.argv[1:] or MODELS:
        maxtext_name, options, hf = MODELS[name]
        trees = {}
        for key, stacked in (("one by one", False), ("scanned", True)):
            model = MaxTextModel(maxtext_name, {**options_of(hf), **options, "scan_layers": stacked})
            trees[key] = compare(name, hf, model, stacked)
        recorded[name] = {"hf": hf, **trees}
        MAXTEXT_TREES.write_text(json.dumps(recorded) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
