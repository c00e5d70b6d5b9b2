"""ModernBERT (arXiv 2412.13663): an encoder whose blocks are gated and normalised before, and whose positions are
rotations. Two of three layers see a window around each token."""

from functools import partial
from typing import Any

import jax

from jaxpaged.layers.attention import KVTensor
from jaxpaged.layers.embedding import embed
from jaxpaged.layers.linear import Linear, with_backend
from jaxpaged.layers.mlp import ACTIVATIONS, Mlp, gated_mlp
from jaxpaged.layers.norm import layer_norm
from jaxpaged.models import encoder
from jaxpaged.models.config import (
    FULL,
    SLIDING,
    HfFields,
    LayerConfig,
    architecture_of,
    common_fields,
)
from jaxpaged.models.decoder import Attention, linear, self_attention
from jaxpaged.models.encoder import Encoder, EncoderConfig, EncoderLayer, norm_specs
from jaxpaged.models.interface import Batch, LayerContext, LayerOutput, Model
from jaxpaged.models.rope_config import by_kind, is_by_kind, longest_sequence, rope_fields, rope_from_params
from jaxpaged.params.sharding import device_sizes
from jaxpaged.params.spec import Spec

IGNORED = (
    *("layer_norm_eps", "embedding_dropout", "mlp_dropout", "decoder_bias", "deterministic_flash_attn"),
    *("sparse_prediction", "sparse_pred_ignore_index", "initializer_cutoff_factor", "cls_token_id"),
    *("repad_logits_with_grad", "reference_compile"),
)
"""Fields of training, and of words that are guessed; `norm_eps` is what norms add."""
THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
"""Kind of layer -> the field of its rotation in config.json as transformers 4 writes it, and what nothing means."""
POOLING = {"cls": "CLS", "mean": "MEAN"}


def config_from_hf(hf: dict[str, Any]) -> EncoderConfig:
    """ModernBERT's config.json. `local_attention` counts the tokens of a window, half of them to each side."""
    fields = HfFields(hf)
    fields.read |= {*encoder.IGNORED, *IGNORED}
    common = common_fields(fields) | {"norm_eps": fields.number("norm_eps", 1e-5)}
    every = fields.count("global_attn_every_n_layers", 3)
    kinds = [SLIDING if i % every else FULL for i in range(common["num_layers"])]
    kinds = fields.of_layers("layer_types", (FULL, SLIDING), kinds)
    windows = {FULL: None, SLIDING: fields.count("local_attention", 128) // 2 + 1}
    params = rope_fields(fields)
    own = by_kind(params) if is_by_kind(params) else dict.fromkeys(THETAS, params)
    ropes = {
        kind: rope_from_params(fields, own[kind], fields.number(*theta), common["head_dim"])
        for kind, theta in THETAS.items()
    }
    classifies = architecture_of(hf).endswith("ForSequenceClassification")
    pooling = POOLING[fields.choice("classifier_pooling", tuple(POOLING), "cls")]
    has_bias = fields.flag("attention_bias", False)
    config = EncoderConfig(
        **common,
        activation=fields.choice("hidden_activation", ("gelu", *ACTIVATIONS), "gelu"),
        layers=tuple(LayerConfig(windows[kind], ropes[kind]) for kind in kinds),
        max_position_embeddings=longest_sequence(ropes[FULL]),
        max_model_len=longest_sequence(ropes[FULL]),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        has_norm_bias=fields.flag("norm_bias", False),
        pooling_type=pooling if classifies else "CLS",
        head_activation=fields.choice("classifier_activation", ("gelu", *ACTIVATIONS), "gelu"),
        has_head_bias=fields.flag("classifier_bias", False),
    )
    fields.refuse_unread()
    return config


def param_specs(config: EncoderConfig, num_model_shards: int) -> Encoder:
    """`Model.param_specs`."""
    device_sizes(config.dim_sizes(), num_model_shards)
    specs = Encoder(
        embed_tokens=Spec("VD", "V D", "model.embeddings.tok_embeddings.weight"),
        embed_positions=None,
        embed_types=None,
        embed_norm=norm_specs(config, "model.embeddings.norm"),
        layers=[layer_specs(config, f"model.layers.{i}", is_first=i == 0) for i in range(config.num_layers)],
        norm=norm_specs(config, "model.final_norm"),
    )
    return with_backend(specs, config.matmul_backend)


def layer_specs(config: EncoderConfig, name: str, is_first: bool) -> EncoderLayer:
    """The embeddings are normalised already when they come into the first layer."""
    queries, keys, values = fused(("NHD", "KHD", "KHD"), f"{name}.attn.Wqkv", config.qkv_bias)
    gate, up = fused(("FD", "FD"), f"{name}.mlp.Wi", config.mlp_bias)
    return EncoderLayer(
        self_attn=Attention(queries, keys, values, linear("DNH", "D NH", f"{name}.attn.Wo", config.o_bias)),
        mlp=Mlp(gate, up, linear("DF", "D F", f"{name}.mlp.Wo", config.mlp_bias)),
        attention_norm=None if is_first else norm_specs(config, f"{name}.attn_norm"),
        mlp_norm=norm_specs(config, f"{name}.mlp_norm"),
    )


def fused(dims: tuple[str, ...], name: str, has_bias: bool) -> list[Linear]:
    """Projections whose rows stand one after another in one tensor."""
    outs = tuple(each.removesuffix("D") for each in dims)
    return [
        Linear(
            Spec(each, f"{out} D", f"{name}.weight", fused=outs, part=part),
            Spec(out, out, f"{name}.bias", fused=outs, part=part) if has_bias else None,
        )
        for part, (each, out) in enumerate(zip(dims, outs, strict=True))
    ]


def embedded(params: Encoder, config: EncoderConfig, batch: Batch) -> jax.Array:
    """Of tokens alone, normalised."""
    return layer_norm(embed(batch.tokens_T, params.embed_tokens, None), params.embed_norm, config.norm_eps)


@partial(jax.jit, static_argnames="config")
def layer(p: EncoderLayer, config: EncoderConfig, x_TD: jax.Array, kv: KVTensor, context: LayerContext) -> LayerOutput:
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    normed_TD = x_TD if p.attention_norm is None else layer_norm(x_TD, p.attention_norm, config.norm_eps)
    x_TD, kv = self_attention(p.self_attn, config, normed_TD, kv, context, x_TD)
    normed_TD = layer_norm(x_TD, p.mlp_norm, config.norm_eps)
    return LayerOutput(gated_mlp(normed_TD, p.mlp, config.activation, x_TD), kv)


MODERNBERT = Model(
    architectures=tuple(f"ModernBert{end}" for end in encoder.ENDS),
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    forward=partial(encoder.forward, embedded, layer),
    head=encoder.no_head,
    compute_logits=encoder.no_logits,
    attention_specs=encoder.attention_specs,
    classifier=encoder.classifier("head.dense", "classifier", norm="head.norm"),
)
