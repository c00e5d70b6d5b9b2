"""Where frameworks that train keep each weight of a checkpoint, as tables.

A row has the path of an array in a framework's tree, its axes by letters, the names of its tensors in the checkpoint,
and what becomes of the numbers. `/` begins a path inside a layer, and `~` stands for what the checkpoint's own names
begin with. Where several tensors are one array, an axis numbers them: L layers, E experts, 2 those that a row lists.
This module knows names only; `framework_trees.py` knows arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

TUNIX = """
embedder.input_embedding       VD    ~embed_tokens.weight
final_norm.w                   D     ~norm.weight
lm_head.w                      DV    lm_head.weight
/input_layernorm.w             D     ~layers.{L}.input_layernorm.weight
/post_attention_layernorm.w    D     ~layers.{L}.post_attention_layernorm.weight
/attn.q_proj.w                 DNH   ~layers.{L}.self_attn.q_proj.weight
/attn.k_proj.w                 DKH   ~layers.{L}.self_attn.k_proj.weight
/attn.v_proj.w                 DKH   ~layers.{L}.self_attn.v_proj.weight
/attn.o_proj.w                 NHD   ~layers.{L}.self_attn.o_proj.weight
/attn.q_bias                   (NH)  ~layers.{L}.self_attn.q_proj.bias
/attn.k_bias                   (KH)  ~layers.{L}.self_attn.k_proj.bias
/attn.v_bias                   (KH)  ~layers.{L}.self_attn.v_proj.bias
/attn.q_norm.w                 H     ~layers.{L}.self_attn.q_norm.weight
/attn.k_norm.w                 H     ~layers.{L}.self_attn.k_norm.weight
/mlp.gate_proj.kernel          DF    ~layers.{L}.mlp.gate_proj.weight
/mlp.up_proj.kernel            DF    ~layers.{L}.mlp.up_proj.weight
/mlp.down_proj.kernel          FD    ~layers.{L}.mlp.down_proj.weight
/mlp.router.kernel             DE    ~layers.{L}.mlp.gate.weight
/mlp.gate_proj                 EDQ   ~layers.{L}.mlp.experts.{E}.gate_proj.weight
/mlp.up_proj                   EDQ   ~layers.{L}.mlp.experts.{E}.up_proj.weight
/mlp.down_proj                 EQD   ~layers.{L}.mlp.experts.{E}.down_proj.weight
"""

TUNIX_GEMMA = """
embedder.input_embedding       VD    ~embed_tokens.weight
final_norm.scale               D     ~norm.weight
/pre_attention_norm.scale      D     ~layers.{L}.input_layernorm.weight
/{post}.scale                  D     ~layers.{L}.post_attention_layernorm.weight
/pre_ffw_norm.scale            D     ~layers.{L}.pre_feedforward_layernorm.weight
/post_ffw_norm.scale           D     ~layers.{L}.post_feedforward_layernorm.weight
/attn._query_norm.scale        H     ~layers.{L}.self_attn.q_norm.weight
/attn._key_norm.scale          H     ~layers.{L}.self_attn.k_norm.weight
/attn.q_einsum.w               NDH   ~layers.{L}.self_attn.q_proj.weight   N>K
/attn.kv_einsum.w              2KDH  ~layers.{L}.self_attn.k_proj.weight,~layers.{L}.self_attn.v_proj.weight   N>K
/attn.qkv_einsum.w             2KDH  ~layers.{L}.self_attn.q_proj.weight,~layers.{L}.self_attn.k_proj.weight,\
~layers.{L}.self_attn.v_proj.weight   N=K
/attn.attn_vec_einsum.w        NHD   ~layers.{L}.self_attn.o_proj.weight
/mlp.gate_proj.kernel          DF    ~layers.{L}.mlp.gate_proj.weight
/mlp.up_proj.kernel            DF    ~layers.{L}.mlp.up_proj.weight
/mlp.down_proj.kernel          FD    ~layers.{L}.mlp.down_proj.weight
"""

MAXTEXT = """
token_embedder.embedding                      VD    ~embed_tokens.weight   padded
decoder.decoder_norm.scale                    D     ~norm.weight
decoder.logits_dense.kernel                   DV    lm_head.weight         padded
/pre_self_attention_layer_norm.scale          D     ~layers.{L}.input_layernorm.weight
/post_self_attention_layer_norm.scale         D     ~layers.{L}.post_attention_layernorm.weight
/self_attention.query.kernel                  DNH   ~layers.{L}.self_attn.q_proj.weight   {query}
/self_attention.key.kernel                    DKH   ~layers.{L}.self_attn.k_proj.weight   {key}
/self_attention.value.kernel                  DKH   ~layers.{L}.self_attn.v_proj.weight
/self_attention.out.kernel                    NHD   ~layers.{L}.self_attn.o_proj.weight
/self_attention.query.bias                    NH    ~layers.{L}.self_attn.q_proj.bias
/self_attention.key.bias                      KH    ~layers.{L}.self_attn.k_proj.bias
/self_attention.value.bias                    KH    ~layers.{L}.self_attn.v_proj.bias
/self_attention.query_norm.scale              H     ~layers.{L}.self_attn.q_norm.weight
/self_attention.key_norm.scale                H     ~layers.{L}.self_attn.k_norm.weight
/mlp.wi_0.kernel                              DF    ~layers.{L}.mlp.gate_proj.weight
/mlp.wi_1.kernel                              DF    ~layers.{L}.mlp.up_proj.weight
/mlp.wo.kernel                                FD    ~layers.{L}.mlp.down_proj.weight
/moe_block.gate.kernel                        DE    ~layers.{L}.mlp.gate.weight
/moe_block.wi_0                               EDQ   ~layers.{L}.mlp.experts.{E}.gate_proj.weight
/moe_block.wi_1                               EDQ   ~layers.{L}.mlp.experts.{E}.up_proj.weight
/moe_block.wo                                 EQD   ~layers.{L}.mlp.experts.{E}.down_proj.weight
/MoeBlock_0.gate.kernel                       DE    ~layers.{L}.block_sparse_moe.gate.weight
/MoeBlock_0.wi_0                              EDQ   ~layers.{L}.block_sparse_moe.experts.{E}.w1.weight
/MoeBlock_0.wi_1                              EDQ   ~layers.{L}.block_sparse_moe.experts.{E}.w3.weight
/MoeBlock_0.wo                                EQD   ~layers.{L}.block_sparse_moe.experts.{E}.w2.weight
"""

MAXTEXT_GEMMA = """
token_embedder.embedding               VD    ~embed_tokens.weight                            times_root_D,padded
decoder.decoder_norm.scale             D     ~norm.weight                                    plus_one
/pre_self_attention_norm{side}.scale   D     ~layers.{L}.input_layernorm.weight              plus_one
/post_self_attention_norm{side}.scale  D     ~layers.{L}.post_attention_layernorm.weight     plus_one
/pre_ffw_norm{side}.scale              D     ~layers.{L}.pre_feedforward_layernorm.weight    plus_one
/post_ffw_norm{side}.scale             D     ~layers.{L}.post_feedforward_layernorm.weight   plus_one
/self_attention{side}.query_norm.scale H     ~layers.{L}.self_attn.q_norm.weight             plus_one
/self_attention{side}.key_norm.scale   H     ~layers.{L}.self_attn.k_norm.weight             plus_one
/self_attention{side}.query.kernel     DNH   ~layers.{L}.self_attn.q_proj.weight             {query}
/self_attention{side}.key.kernel       DKH   ~layers.{L}.self_attn.k_proj.weight
/self_attention{side}.value.kernel     DKH   ~layers.{L}.self_attn.v_proj.weight
/self_attention{side}.out.kernel       NHD   ~layers.{L}.self_attn.o_proj.weight
/mlp{side}.wi_0.kernel                 DF    ~layers.{L}.mlp.gate_proj.weight
/mlp{side}.wi_1.kernel                 DF    ~layers.{L}.mlp.up_proj.weight
/mlp{side}.wo.kernel                   FD    ~layers.{L}.mlp.down_proj.weight
"""


@dataclass(frozen=True)
class Row:
    """One kind of array. `axes`: letters; brackets are around those of one axis. `steps`: what becomes of the
    checkpoint's numbers on their way to the framework, and conditions."""

    path: str
    axes: str
    tensors: tuple[str, ...]
    steps: tuple[str, ...] = ()

    @property
    def is_of_layer(self) -> bool:
        return self.path.startswith("/")


@dataclass(frozen=True)
class Layers:
    """Where a tree keeps layers, with {L} for a layer's number, and {I} and {P} for that of its block and its place
    there; a block has `period` layers. `stacked`: layers of one path are one array, along its second axis. `rest`:
    where those are that fill no block."""

    path: str
    period: int = 1
    stacked: bool = False
    rest: str | None = None
    sides: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Layout:
    """The tables of one framework for some architectures. `layers`: where it may keep them. `rope_type`: for
    models that stretch angles so, and before those for all others, where it is None."""

    architectures: tuple[str, ...]
    table: str
    layers: tuple[Layers, ...]
    rope_type: str | None = None

    @property
    def rows(self) -> list[Row]:
        return [row_of(line) for line in self.table.replace("\\\n", "").strip().splitlines()]


def row_of(line: str) -> Row:
    path, axes, tensors, *steps = line.split()
    return Row(path, axes, tuple(tensors.split(",")), tuple(step for each in steps for step in each.split(",") if step))


def filled(table: str, **values: str) -> str:
    """A table with some of its names in braces replaced."""
    for name, value in values.items():
        table = table.replace(f"{{{name}}}", value)
    return table


LLAMAS, MISTRALS = ("LlamaForCausalLM",), ("MistralForCausalLM", "MixtralForCausalLM")
QWENS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
GEMMA2, GEMMA3 = ("Gemma2ForCausalLM",), ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
PLAIN = (Layers("layers.{L}"), Layers("layers_{L}"))
ONE_BY_ONE, SCANNED = Layers("decoder.layers_{L}"), Layers("decoder.layers", stacked=True)
SIDES = ("_local", "_global")
PAIRED = (
    Layers("decoder.layers_{I}", period=2, sides=SIDES),
    Layers("decoder.layers", period=2, stacked=True, sides=SIDES),
)
IN_SIXES = Layers("decoder.layers.layers_{P}", 6, stacked=True, rest="decoder.layers_remainder.layers_{P}")

LAYOUTS: dict[str, Sequence[Layout]] = {
    "tunix": (
        Layout((*LLAMAS, *QWENS), TUNIX, PLAIN),
        Layout(GEMMA2, filled(TUNIX_GEMMA, post="post_attn_norm"), PLAIN),
        Layout(GEMMA3, filled(TUNIX_GEMMA, post="post_attention_norm"), PLAIN),
    ),
    "maxtext": (
        Layout(LLAMAS, filled(MAXTEXT, query="pairs,over_root_H", key="pairs"), (ONE_BY_ONE, SCANNED), "llama3"),
        Layout((*LLAMAS, *MISTRALS), filled(MAXTEXT, query="over_root_H", key=""), (ONE_BY_ONE, SCANNED)),
        Layout(QWENS, filled(MAXTEXT, query="", key=""), (ONE_BY_ONE, SCANNED)),
        Layout(GEMMA2, filled(MAXTEXT_GEMMA, query="over_root_H"), PAIRED),
        Layout(GEMMA3, filled(MAXTEXT_GEMMA, query=""), (ONE_BY_ONE, IN_SIXES)),
    ),
}
"""Framework -> its layouts, which are those of Tunix (`models/*/params*.py`, August 2026) and of the models of MaxText
0.2.5 (`scripts/update_maxtext_goldens.py`)."""

NNX = "nnx"
"""Modules of flax that are called as the checkpoint's are, with flax's own names of arrays."""
MAPPINGS = (*LAYOUTS, NNX)
