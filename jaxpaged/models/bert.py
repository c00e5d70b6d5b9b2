"""BERT (arXiv 1810.04805), RoBERTa (1907.11692), XLM-RoBERTa (1911.02116): encoders that normalise the sum of a block
and what went into it, with biases everywhere and a table of positions.

RoBERTa's positions begin behind the number of its padding token.
"""

from functools import partial
from typing import Any

import jax

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.attention import KVTensor
from jaxpaged.layers.embedding import rows_of
from jaxpaged.layers.linear import with_backend
from jaxpaged.layers.mlp import Mlp, gated_mlp
from jaxpaged.layers.norm import layer_norm
from jaxpaged.models import encoder
from jaxpaged.models.config import HfFields, LayerConfig, common_fields
from jaxpaged.models.decoder import Attention, linear, self_attention
from jaxpaged.models.encoder import Encoder, EncoderConfig, EncoderLayer, norm_specs
from jaxpaged.models.interface import Batch, LayerContext, LayerOutput, Model
from jaxpaged.params.sharding import device_sizes
from jaxpaged.params.spec import Spec

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_pytorch_tanh", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}
"""`hidden_act` in config.json -> the name in `layers/mlp.py`."""


def bert_config(hf: dict[str, Any]) -> EncoderConfig:
    """BERT's config.json."""
    return config_of(HfFields(hf), first_position=0, num_token_types=2)


def roberta_config(hf: dict[str, Any]) -> EncoderConfig:
    """That of both others."""
    fields = HfFields(hf)
    return config_of(fields, first_position=fields.index("pad_token_id", 1) + 1, num_token_types=2)


def config_of(fields: HfFields, first_position: int, num_token_types: int) -> EncoderConfig:
    """`num_token_types`: of a config.json that says nothing."""
    fields.read |= set(encoder.IGNORED)
    common = common_fields(fields) | {"norm_eps": fields.number("layer_norm_eps", 1e-12)}
    num_positions = fields.count("max_position_embeddings", 512)
    if num_positions <= first_position:
        raise CheckpointError(
            f"config.json: max_position_embeddings is {num_positions}, but the first token has place {first_position}, "
            "behind pad_token_id. Download the model again."
        )
    config = EncoderConfig(
        **common,
        activation=ACTIVATIONS[fields.choice("hidden_act", tuple(ACTIVATIONS), "gelu")],
        layers=(LayerConfig(None, None),) * common["num_layers"],
        max_position_embeddings=num_positions - first_position,
        max_model_len=num_positions - first_position,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        num_positions=num_positions,
        first_position=first_position,
        num_token_types=fields.count("type_vocab_size", num_token_types),
    )
    fields.refuse_unread()
    return config


def param_specs(config: EncoderConfig, num_model_shards: int) -> Encoder:
    """`Model.param_specs`."""
    device_sizes(config.dim_sizes(), num_model_shards)
    name = "model.embeddings"
    specs = Encoder(
        embed_tokens=Spec("VD", "V D", f"{name}.word_embeddings.weight"),
        embed_positions=Spec("gD", "g D", f"{name}.position_embeddings.weight"),
        embed_types=Spec("iD", "i D", f"{name}.token_type_embeddings.weight"),
        embed_norm=norm_specs(config, f"{name}.LayerNorm"),
        layers=[layer_specs(config, f"model.encoder.layer.{i}") for i in range(config.num_layers)],
    )
    return with_backend(specs, config.matmul_backend)


def layer_specs(config: EncoderConfig, name: str) -> EncoderLayer:
    own, attention = f"{name}.attention.self", f"{name}.attention"
    return EncoderLayer(
        self_attn=Attention(
            q_proj=linear("NHD", "NH D", f"{own}.query", has_bias=True),
            k_proj=linear("KHD", "KH D", f"{own}.key", has_bias=True),
            v_proj=linear("KHD", "KH D", f"{own}.value", has_bias=True),
            o_proj=linear("DNH", "D NH", f"{attention}.output.dense", has_bias=True),
        ),
        mlp=Mlp(
            gate_proj=None,
            up_proj=linear("FD", "F D", f"{name}.intermediate.dense", has_bias=True),
            down_proj=linear("DF", "D F", f"{name}.output.dense", has_bias=True),
        ),
        attention_norm=norm_specs(config, f"{attention}.output.LayerNorm"),
        mlp_norm=norm_specs(config, f"{name}.output.LayerNorm"),
    )


def embedded(params: Encoder, config: EncoderConfig, batch: Batch) -> jax.Array:
    """Of tokens, of their kinds and of their places, normalised. A token of kind k has its id plus k vocabularies."""
    types_T, tokens_T = batch.tokens_T // config.vocab_size, batch.tokens_T % config.vocab_size
    x_TD = rows_of(params.embed_tokens, tokens_T) + rows_of(params.embed_types, types_T)
    x_TD = x_TD + rows_of(params.embed_positions, batch.positions_T + config.first_position)
    return layer_norm(x_TD, params.embed_norm, config.norm_eps)


@partial(jax.jit, static_argnames="config")
def layer(p: EncoderLayer, config: EncoderConfig, x_TD: jax.Array, kv: KVTensor, context: LayerContext) -> LayerOutput:
    """norm(x + attention(x)), then norm(x + mlp(x))."""
    x_TD, kv = self_attention(p.self_attn, config, x_TD, kv, context, x_TD)
    x_TD = layer_norm(x_TD, p.attention_norm, config.norm_eps)
    x_TD = gated_mlp(x_TD, p.mlp, config.activation, x_TD)
    return LayerOutput(layer_norm(x_TD, p.mlp_norm, config.norm_eps), kv)


def encoder_model(names: tuple[str, ...], read: Any, classifier: Any) -> Model:
    """The record of architectures whose names begin so."""
    return Model(
        architectures=tuple(f"{name}{end}" for name in names for end in encoder.ENDS),
        config_from_hf=read,
        param_specs=param_specs,
        forward=partial(encoder.forward, embedded, layer),
        head=encoder.no_head,
        compute_logits=encoder.no_logits,
        attention_specs=encoder.attention_specs,
        classifier=classifier,
    )


BERT = encoder_model(("Bert",), bert_config, encoder.classifier("model.pooler.dense", "classifier"))
ROBERTA = encoder_model(
    ("Roberta", "XLMRoberta"), roberta_config, encoder.classifier("classifier.dense", "classifier.out_proj")
)
