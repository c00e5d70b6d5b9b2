"""EAGLE-3: a layer that drafts from what three layers of a decoder passed on (arXiv 2503.01840).

Its input is an embedding and a feature side by side; a feature is a linear function of the three residual streams. It
knows a part of the vocabulary, mostly: `d2t` says by how much the id of each of its tokens is less than the decoder's.
Checkpoints hold the layer as `midlayer` or as `layers.0`, and the embeddings where they are not the decoder's.

There are two kinds of config.json: that of the method's authors, SpecForge and ModelOpt, a Llama's with some fields
more; and that of `speculators`, which has the Llama's fields in a part of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.layers.attention import KVTensor
from jaxpaged.layers.embedding import Table, vocabulary_logits
from jaxpaged.layers.linear import Linear, apply_linear, with_backend
from jaxpaged.layers.mlp import Mlp, gated_mlp
from jaxpaged.layers.norm import Norm, rms_norm
from jaxpaged.models.config import DecoderConfig, HfFields, short
from jaxpaged.models.decoder import Attention, linear, mlp_with_bias, norm, pre_norm_config, self_attention
from jaxpaged.models.interface import Head, HeadConfig, LayerContext
from jaxpaged.params.checkpoint import entries_of_folder
from jaxpaged.params.safetensors_reader import BOOL_DTYPES, WHOLE_DTYPES, TensorEntry, mapped
from jaxpaged.params.sharding import device_sizes
from jaxpaged.params.spec import Spec

EMBEDDINGS = "model.embed_tokens.weight"
TAPS = "eagle_aux_hidden_state_layer_ids"
NUM_TAPS = 3
INNER_VALUES = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""What else `eagle_config` may say, each at the only value that describes the layer that is computed here."""
LAYER_FIELDS = "transformer_layer_config"
TOOL_FIELDS = {
    "speculators_config",
    "speculators_version",
    "has_no_defaults_at_init",
    "embed_requires_grad",
    LAYER_FIELDS,
}
"""Fields of `speculators` that say nothing of the forward pass, and the one that has others in it."""


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """`decoder_size`: width of the decoder. `has_embeddings`: the head has a table of its own. `norm_before_residual`:
    the layer adds to the normalised feature."""

    decoder_size: int = 0
    draft_vocab_size: int = 0
    has_embeddings: bool = False
    norm_before_residual: bool = False

    @property
    def maps_tokens(self) -> bool:
        """Whether the head's tokens have ids of their own."""
        return self.draft_vocab_size != self.vocab_size

    def dim_sizes(self) -> dict[str, int]:
        return {**super().dim_sizes(), "A": NUM_TAPS * self.decoder_size, "X": self.draft_vocab_size}


@struct.dataclass
class Layer:
    """The names are the checkpoint's. Projections to queries, keys and values have twice the width as input."""

    self_attn: Attention
    mlp: Mlp
    input_layernorm: Norm
    hidden_norm: Norm
    post_attention_layernorm: Norm


@struct.dataclass
class Eagle3:
    """All parameters of a head. `embed_tokens` is None where the decoder's serve, `d2t` where ids are the decoder's."""

    embed_tokens: Table | None  # [V, D]
    fc: Linear
    layer: Layer
    norm: Norm
    lm_head: Table  # [X, D]
    d2t: jax.Array | None  # [X]


@struct.dataclass
class DraftTokens:
    """What logits are computed with. `vocab_size` is the decoder's, with what pads its table."""

    lm_head: Table
    d2t: jax.Array | None
    vocab_size: int = struct.field(pytree_node=False)


def config_from_hf(hf: dict[str, Any], folder: Path, decoder: DecoderConfig) -> Eagle3Config:
    """config.json of a head for `decoder`, whose weights lie in `folder`, if they are there.

    Raises CheckpointError for what is missing or not supported, ConfigError for a head that was made for another model.
    """
    fields, entries = HfFields(flattened(hf)), {}
    if any(folder.glob("*.safetensors")):
        entries = entries_of_folder(folder)
    if fields.count("num_hidden_layers") != 1:
        raise CheckpointError(
            f"config.json: num_hidden_layers is {fields.hf['num_hidden_layers']}; an EAGLE-3 head has 1."
        )
    own = {
        "decoder_size": fields.count("target_hidden_size", decoder.hidden_size),
        "draft_vocab_size": fields.count("draft_vocab_size", fields.count("vocab_size")),
        "norm_before_residual": fields.flag("norm_before_residual", False),
        "taps": read_taps(fields, decoder.num_layers),
        "has_embeddings": EMBEDDINGS in entries,
    }
    has_bias = fields.flag("attention_bias", False)
    shared = pre_norm_config(
        fields, [None], qkv_bias=has_bias, o_bias=has_bias, mlp_bias=fields.flag("mlp_bias", False)
    )
    config = Eagle3Config(**{**vars(shared), **own})
    check_fits(config, decoder)
    check_known_tokens(entries, config)
    return config


def flattened(hf: dict[str, Any]) -> dict[str, Any]:
    """config.json of either kind as one of the first. Raises CheckpointError for another one of `speculators`."""
    if "speculators_model_type" not in hf:
        return hf
    kind, layer = hf["speculators_model_type"], hf.get(LAYER_FIELDS)
    if kind != "eagle3" or not isinstance(layer, dict):
        raise CheckpointError(
            f"config.json: speculators_model_type is {short(kind)} and {LAYER_FIELDS} {short(layer)}; only 'eagle3' "
            "with the fields of a layer is supported."
        )
    known = TOOL_FIELDS | {"speculators_model_type"}
    return {"norm_before_residual": True, **layer, **{name: value for name, value in hf.items() if name not in known}}


def read_taps(fields: HfFields, num_layers: int) -> tuple[int, ...]:
    """The layers whose input the head reads: an early one, one in the middle and a late one, unless it says which."""
    inner = fields.value("eagle_config", {})
    if not isinstance(inner, dict):
        raise CheckpointError(f"config.json: eagle_config is {short(inner)}; it must be an object.")
    for name, value in inner.items():
        if name != TAPS and value != INNER_VALUES.get(name):
            only = f"only {INNER_VALUES[name]!r} is supported" if name in INNER_VALUES else "nothing is known of it"
            raise CheckpointError(f"config.json: eagle_config.{name} is {short(value)}; {only}.")
    taps = fields.value(TAPS, inner.get(TAPS)) or [2, num_layers // 2, num_layers - 3]
    whole = isinstance(taps, list) and all(type(tap) is int and 0 <= tap <= num_layers for tap in taps)
    if not whole or len(taps) != NUM_TAPS:
        raise CheckpointError(
            f"{TAPS} is {short(taps)}; it must name {NUM_TAPS} of the decoder's {num_layers} layers, from 0."
        )
    return tuple(taps)


def check_fits(config: Eagle3Config, decoder: DecoderConfig) -> None:
    """Raise ConfigError for a head that cannot have been made for this decoder."""
    if config.decoder_size != decoder.hidden_size:
        raise ConfigError(
            f"speculative_config.model was made for a model of width {config.decoder_size}, and this one has "
            f"{decoder.hidden_size}. Choose the head of this model."
        )
    if not config.has_embeddings and config.hidden_size != decoder.hidden_size:
        raise ConfigError(
            f"speculative_config.model has a width of {config.hidden_size} and no embeddings, and those of this model "
            f"are {decoder.hidden_size} wide. Choose the head of this model."
        )


def check_known_tokens(entries: Mapping[str, TensorEntry], config: Eagle3Config) -> None:
    """Raise CheckpointError unless both tables of a checkpoint name the same tokens: `d2t`, which is read unless the
    head knows all, and `t2d`, which says of each of the decoder's whether the head knows it."""
    known = np.arange(config.vocab_size)[: config.draft_vocab_size]
    tables = {name: entries[name] for name in ("d2t", "t2d") if name in entries}
    if "d2t" in tables and tables["d2t"].shape == known.shape:
        with mapped(tables["d2t"], WHOLE_DTYPES) as less:
            known = known + less
    agrees = config.maps_tokens or np.array_equal(known, np.arange(config.vocab_size))
    if "t2d" in tables and agrees:
        with mapped(tables["t2d"], {**BOOL_DTYPES, **WHOLE_DTYPES}) as flags:
            agrees = flags.size == config.vocab_size and np.array_equal(np.flatnonzero(flags), np.sort(known))
    if not agrees:
        path = next(iter(tables.values())).path
        raise CheckpointError(
            f"{path}: the tables {' and '.join(tables)} do not say of the same {config.draft_vocab_size} tokens that "
            "the head knows them (draft_vocab_size in config.json). Download the head again."
        )


def param_specs(config: Eagle3Config, num_model_shards: int) -> Eagle3:
    """Specs of all parameters. Raises ConfigError when the head cannot be split over so many shards."""
    device_sizes(config.dim_sizes(), num_model_shards)
    name = "model.layers.0"
    projection = lambda letter, part: linear(
        f"{letter}HZ", f"{letter}H Z", f"{name}.self_attn.{part}_proj", config.qkv_bias
    )
    head = Eagle3(
        embed_tokens=Spec("VD", "V D", EMBEDDINGS) if config.has_embeddings else None,
        fc=linear("DA", "D A", "fc"),
        layer=Layer(
            self_attn=Attention(
                q_proj=projection("N", "q"),
                k_proj=projection("K", "k"),
                v_proj=projection("K", "v"),
                o_proj=linear("DNH", "D NH", f"{name}.self_attn.o_proj", config.o_bias),
            ),
            mlp=mlp_with_bias(config, f"{name}.mlp"),
            input_layernorm=norm("D", f"{name}.input_layernorm"),
            hidden_norm=norm("D", f"{name}.hidden_norm"),
            post_attention_layernorm=norm("D", f"{name}.post_attention_layernorm"),
        ),
        norm=norm("D", "model.norm"),
        lm_head=Spec("XD", "X D", "lm_head.weight"),
        d2t=Spec("X", "X", "d2t", dtype="int32") if config.maps_tokens else None,
    )
    return with_backend(head, config.matmul_backend)


def features(params: Eagle3, config: Eagle3Config, hidden_TD: jax.Array, taps: tuple[jax.Array, ...]) -> jax.Array:
    """[T, D] of three residual streams, each as wide as the decoder."""
    return apply_linear("TA,DA->TD", jnp.concatenate(taps, axis=-1), params.fc)


def forward(
    params: Eagle3,
    config: Eagle3Config,
    embedded_TD: jax.Array,
    before_TD: jax.Array,
    kv: KVTensor,
    context: LayerContext,
) -> tuple[jax.Array, jax.Array, KVTensor]:
    """The layer and the last norm; the output before that norm stands for features."""
    p = params.layer
    feature_TD = rms_norm(before_TD, p.hidden_norm, config.norm)
    x_TD = feature_TD if config.norm_before_residual else before_TD
    both_TZ = jnp.concatenate([rms_norm(embedded_TD, p.input_layernorm, config.norm), feature_TD], axis=-1)
    attended_TD, kv = self_attention(p.self_attn, config, both_TZ, kv, context)
    x_TD = x_TD + attended_TD
    normed_TD = rms_norm(x_TD, p.post_attention_layernorm, config.norm)
    x_TD = x_TD + gated_mlp(normed_TD, p.mlp, config.activation)
    return rms_norm(x_TD, params.norm, config.norm), x_TD, kv


def draft_tokens(params: Eagle3, table_VD: Table) -> DraftTokens:
    return DraftTokens(params.lm_head, params.d2t, table_VD.shape[0])


def compute_logits(head: DraftTokens, config: Eagle3Config, hidden_SD: jax.Array) -> jax.Array:
    """Float32 logits [S, V] over the decoder's tokens; -inf for those that the head does not know."""
    logits_SX = vocabulary_logits(hidden_SD, head.lm_head, config.draft_vocab_size, None, config.matmul_backend)
    if head.d2t is None:
        return logits_SX
    num_drafts = logits_SX.shape[1]
    own_X = jnp.arange(num_drafts, dtype=jnp.int32)
    token_X = jnp.where(own_X < config.draft_vocab_size, own_X + head.d2t, head.vocab_size)
    own_V = jnp.full(head.vocab_size, num_drafts, jnp.int32).at[token_X].set(own_X, mode="drop")
    logits_SX = jnp.pad(logits_SX, ((0, 0), (0, 1)), constant_values=-jnp.inf)
    return logits_SX[:, own_V]


EAGLE3 = Head(
    param_specs=param_specs,
    features=features,
    forward=forward,
    head=draft_tokens,
    compute_logits=compute_logits,
)
