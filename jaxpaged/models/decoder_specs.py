"""Parameters of decoder-only models, declared by letters under their Hugging Face names.

The containers are those of `decoder.py`, holding a `Spec` where the model holds an array.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxpaged.layers.experts import Experts
from jaxpaged.layers.linear import Linear, with_backend
from jaxpaged.layers.mlp import Mlp
from jaxpaged.layers.norm import Norm
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.decoder import Attention, Decoder, Layer
from jaxpaged.params.sharding import device_sizes
from jaxpaged.params.spec import Spec

PRE_NORMS = {name: name for name in ("input_layernorm", "post_attention_layernorm")}
"""The norms of a layer that normalises what goes into its blocks: name in `Layer` -> name in the checkpoint."""
POST_NORMS = {name: name for name in ("post_attention_layernorm", "post_feedforward_layernorm")}
"""Those of one that normalises what comes out of them."""
SANDWICH_NORMS = {**PRE_NORMS, **POST_NORMS, "pre_feedforward_layernorm": "pre_feedforward_layernorm"}
"""Those of one that does both."""


def decoder_specs(
    config: DecoderConfig,
    num_model_shards: int,
    *,
    qk_norm: bool = False,
    whole_qk_norm: bool = False,
    norms: Mapping[str, str] = PRE_NORMS,
    fused: bool = False,
    sinks: bool = False,
    self_attention: Callable[[DecoderConfig, str], Any] | None = None,
    feed_forward: Callable[[DecoderConfig, str, int], Mlp | Experts] | None = None,
) -> Decoder:
    """Specs of a whole decoder. Raises ConfigError when the model cannot be split over so many shards.

    `qk_norm`: norms on query and key heads, `whole_qk_norm` on all heads as one vector. `norms`: which a layer has, and
    what the checkpoint calls them. `fused`: the checkpoint keeps query, key and value projections in one tensor, and
    gate and up in another. `sinks`: each query head has one. `self_attention` makes what a layer has in place of an
    `Attention`. `feed_forward` makes that block of a layer's name and number, where layers differ or it is another one.
    """
    device_sizes(config.dim_sizes(), num_model_shards)
    attention = self_attention or (fused_attention if fused else attention_with_bias)
    mlp = fused_mlp if fused else mlp_with_bias
    layers = []
    for i in range(config.num_layers):
        name = f"model.layers.{i}"
        self_attn = attention(config, f"{name}.self_attn")
        if qk_norm or whole_qk_norm:
            query, key = ("NH", "KH") if whole_qk_norm else ("H", "H")
            self_attn = self_attn.replace(
                q_norm=norm(query, f"{name}.self_attn.q_norm"), k_norm=norm(key, f"{name}.self_attn.k_norm")
            )
        if sinks:
            self_attn = self_attn.replace(sinks=Spec("N", "N", f"{name}.self_attn.sinks", dtype="float32"))
        of_layer = {field: norm("D", f"{name}.{there}") for field, there in norms.items()}
        block = feed_forward(config, name, i) if feed_forward else mlp(config, f"{name}.mlp")
        layers.append(Layer(self_attn=self_attn, mlp=block, **of_layer))
    decoder = Decoder(
        embed_tokens=Spec("VD", "V D", "model.embed_tokens.weight"),
        layers=layers,
        norm=norm("D", "model.norm"),
        lm_head=None if config.tie_embeddings else Spec("VD", "V D", "lm_head.weight"),
    )
    return with_backend(decoder, config.matmul_backend)


def norm(dims: str, name: str) -> Norm:
    return Norm(Spec(dims, dims, f"{name}.weight"))


def linear(dims: str, hf_dims: str, name: str, has_bias: bool = False) -> Linear:
    """A projection; its bias has the axes that the checkpoint merged into the weight's first one."""
    out = hf_dims.split(" ")[0]
    return Linear(Spec(dims, hf_dims, f"{name}.weight"), Spec(out, out, f"{name}.bias") if has_bias else None)


def attention_with_bias(config: DecoderConfig, name: str) -> Attention:
    return Attention(
        q_proj=linear("NHD", "NH D", f"{name}.q_proj", config.qkv_bias),
        k_proj=linear("KHD", "KH D", f"{name}.k_proj", config.qkv_bias),
        v_proj=linear("KHD", "KH D", f"{name}.v_proj", config.qkv_bias),
        o_proj=linear("DNH", "D NH", f"{name}.o_proj", config.o_bias),
    )


def mlp_with_bias(config: DecoderConfig, name: str) -> Mlp:
    return Mlp(
        gate_proj=linear("FD", "F D", f"{name}.gate_proj", config.mlp_bias),
        up_proj=linear("FD", "F D", f"{name}.up_proj", config.mlp_bias),
        down_proj=linear("DF", "D F", f"{name}.down_proj", config.mlp_bias),
    )


def fused_attention(config: DecoderConfig, name: str) -> Attention:
    """Query, key and value rows stand one after another in `qkv_proj`."""
    qkv = [
        Linear(Spec(dims, hf_dims, f"{name}.qkv_proj.weight", fused=("NH", "KH", "KH"), part=part))
        for part, (dims, hf_dims) in enumerate([("NHD", "NH D"), ("KHD", "KH D"), ("KHD", "KH D")])
    ]
    return Attention(*qkv, o_proj=linear("DNH", "D NH", f"{name}.o_proj"))


def fused_mlp(config: DecoderConfig, name: str) -> Mlp:
    """Gate and up rows stand one after another in `gate_up_proj`."""
    gate, up = (
        Linear(Spec("FD", "F D", f"{name}.gate_up_proj.weight", fused=("F", "F"), part=part)) for part in range(2)
    )
    return Mlp(gate, up, linear("DF", "D F", f"{name}.down_proj"))
