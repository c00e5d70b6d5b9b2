"""config.json -> DecoderConfig: what a decoder model is, in numbers, frozen and hashable.

`HfFields` reads the raw dictionary, in the spelling of transformers 4 and 5, and remembers what was read: a field
that nobody read and that is not known to be harmless would change the maths, so it is an error. What a field
means for one architecture is said in that architecture's module. transformers is not imported.
"""

import json
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.experts import RouterConfig
from jaxpaged.layers.linear import XLA
from jaxpaged.layers.mlp import Activation
from jaxpaged.layers.norm import NormConfig
from jaxpaged.layers.rope import QueryGrowth, RopeConfig
from jaxpaged.models.vision.interface import VisionConfig
from jaxpaged.params.mistral_folder import description_of
from jaxpaged.params.other_formats import (
    is_mistral_folder,
    refuse_adapter,
    refuse_other_folder,
    refuse_part_of_pipeline,
)
from jaxpaged.params.schemes import reading
from jaxpaged.params.schemes.scheme import Quantization

NAMED, LATER = "named", "later"
"""Metadata of fields, for `facts_text`: the name under which a field began, and that it came later."""


ATTENTION, SHORT_CONV = "attention", "short_conv"
"""What a layer has to bring tokens together."""


@dataclass(frozen=True)
class LayerConfig:
    """What differs from layer to layer. `window`: tokens that a query sees, itself included; None: all.

    `rope`: how positions become angles; None: queries and keys are not rotated. `chunk`: a query sees no position
    before the last multiple of it; None: it does. `mixer`: what brings tokens together, attention or SHORT_CONV.
    """

    window: int | None
    rope: RopeConfig | None
    chunk: int | None = None
    mixer: str = field(default=ATTENTION, metadata={LATER: True})


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of latent attention: keys and values of a token are made of a latent of `rank` numbers.

    A key has `plain_dim` numbers of it, and `rope_dim` that are rotated and all heads share; a value has `value_dim`.
    `query_rank`: size of the latent that queries are made of; None: they are made of the hidden state itself.
    """

    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None

    @property
    def width(self) -> int:
        """Numbers that are cached for a token."""
        return self.rank + self.rope_dim


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward blocks of `num_experts` experts, each of `width` columns, in the layers that `layers` names.

    `shared_width`: columns of the experts that all tokens share, 0 where there are none. `encoding`: what config.json
    calls the way in which the weights of experts are packed. `num_redundant`: so many more places than experts there
    are at least, which the engine's options say (`expert_balance.py`). `has_correction`: of an architecture that may do
    without, the checkpoint has numbers that are added to scores where experts are chosen.
    """

    num_experts: int
    width: int
    router: RouterConfig
    layers: tuple[int, ...]
    shared_width: int = 0
    encoding: str | None = None
    num_redundant: int = 0
    has_correction: bool = field(default=False, metadata={LATER: True})

    @property
    def num_places(self) -> int:
        return self.num_experts + self.num_redundant

    def dim_sizes(self) -> dict[str, int]:
        """Letter -> size of that axis in the checkpoint; of places, how many there should be."""
        return {"E": self.num_experts, "e": self.num_places, "Q": self.width, "O": self.shared_width}


@dataclass(frozen=True)
class ShortConvConfig:
    """A convolution sees `width` tokens, the newest one included. `has_bias`: so have the projections around it."""

    width: int
    has_bias: bool


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer. Static under jit, so layers of one kind share one trace.

    `query_scale` multiplies the attention scores, `embed_scale` the embeddings. `max_position_embeddings` is the
    longest sequence the model is made for, rope scaling included. `max_model_len` is the engine's limit, equal to
    it until replaced. `dtype` is the checkpoint's. `deterministic` is the engine's option, and `matmul_backend` the
    kernel with which the engine's device multiplies (`layers/linear.py`).
    `offset_norms`: the weights of norms say how far a factor is from 1; `centred_norms`: norms take off the mean.
    `interleaved_rope`: neighbours of a head are rotated together. `rotated_norm`: rotated queries and keys are
    normalised, without weights. `residual_scale` and `logit_scale` multiply what a block adds to the residual stream,
    and the logits. `latents`: there are latents in place of keys and values; then `head_dim` is that of queries.
    `short_conv`: what the convolutions are of layers that have one.
    `vision`: what the tower is that makes embeddings of pictures, where there is one. `normed_embeddings`: embeddings
    are normalised, without weights.
    `quantization`: how the checkpoint stores weights in fewer bits, if it does (`params/schemes`).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    activation: Activation
    tie_embeddings: bool
    query_scale: float
    max_position_embeddings: int
    max_model_len: int
    dtype: str
    layers: tuple[LayerConfig, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    embed_scale: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    experts: ExpertsConfig | None = None
    num_labels: int = 0  # of the classifier, if there is one
    num_mtp_layers: int = 0  # that predict further tokens, and lie in the checkpoint too
    offset_norms: bool = False
    centred_norms: bool = False
    interleaved_rope: bool = False
    rotated_norm: bool = False
    query_growth: QueryGrowth | None = None
    residual_scale: float | None = None
    logit_scale: float | None = None
    latents: LatentConfig | None = None
    quantization: Quantization | None = field(default=None, metadata={NAMED: "weight_block"})
    deterministic: bool = False
    matmul_backend: str = field(default=XLA, metadata={NAMED: "few_rows"})
    short_conv: ShortConvConfig | None = field(default=None, metadata={LATER: True})
    vision: VisionConfig | None = field(default=None, metadata={LATER: True})
    normed_embeddings: bool = field(default=False, metadata={LATER: True})

    splits_into_stages: ClassVar[bool] = True
    """Whether neighbouring layers can be a model of their own."""
    sees_both_ways: ClassVar[bool] = False
    """Whether tokens see those behind them, so that a text is computed whole, and none is drawn."""

    @property
    def num_caches(self) -> int:
        """How many layers cache something: the first ones."""
        return self.num_layers

    @property
    def pooling_defaults(self) -> dict[str, Any]:
        """Pooling options of a checkpoint that says nothing of them."""
        return {}

    def leaves_out(self, name: str) -> bool:
        """Whether the model does without a tensor that published files have."""
        return False

    @property
    def norm(self) -> NormConfig:
        """How every norm of the model is computed."""
        return NormConfig(
            self.norm_eps, self.offset_norms, self.centred_norms, self.deterministic, backend=self.matmul_backend
        )

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers whose feed-forward block is made of experts."""
        return self.experts.layers if self.experts else ()

    @property
    def columns_per_token(self) -> int:
        """The most feed-forward columns that one layer computes for a token."""
        if self.experts is None:
            return self.intermediate_size
        of_experts = self.experts.router.experts_per_token * self.experts.width + self.experts.shared_width
        return max(of_experts, 0 if len(self.sparse_layers) == self.num_layers else self.intermediate_size)

    @property
    def pairs_per_token(self) -> int:
        """How many experts a token goes to in a layer that has some; 0 if none has."""
        return self.experts.router.experts_per_token if self.experts else 0

    @property
    def share_of_experts(self) -> float:
        """How many of the places of experts of a layer a token goes to; 1 where there are none."""
        return self.experts.router.experts_per_token / self.experts.num_places if self.experts else 1.0

    @property
    def attended_dim(self) -> float:
        """Numbers of a head that meet each token of a context, on average of the products with keys and with values."""
        return self.head_dim if self.latents is None else self.latents.rank + self.latents.rope_dim / 2

    def dim_sizes(self) -> dict[str, int]:
        """Letter -> size of that axis in the checkpoint."""
        experts, latents = self.experts, self.latents
        of_latents = (
            {
                "a": latents.query_rank or 0,
                "c": latents.rank,
                "w": latents.width,
                "k": latents.plain_dim,
                "v": latents.value_dim,
            }
            if latents
            else {}
        )
        of_experts = experts.dim_sizes() if experts else {}
        of_convolutions = {"x": self.hidden_size, "t": self.short_conv.width} if self.short_conv else {}
        of_tower = self.vision.dim_sizes() if self.vision else {}
        return {
            **of_experts,
            **of_latents,
            **of_convolutions,
            **of_tower,
            "D": self.hidden_size,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "H": self.head_dim,
            "F": self.intermediate_size,
            "V": self.vocab_size,
            "Y": self.num_labels,
        }


MAX_COUNT, MAX_NUMBER = 2**31 - 1, 3e38
"""The largest numbers that programs compute with: of int32, and of float32."""
MOST = {"num_hidden_layers": 10_000}
"""Fields of which less is far too much."""


def is_positive(found: Any) -> bool:
    return type(found) in (int, float) and 0 < found <= MAX_NUMBER


SLIDING, FULL = "sliding_attention", "full_attention"
"""The two kinds of layers that `layer_types` in config.json names."""


class HfFields:
    """Reads the fields of one config.json, each checked for its type, and knows which ones nobody read."""

    def __init__(self, hf: dict[str, Any]):
        self.hf = hf
        self.read: set[str] = set()

    def value(self, name: str, default: Any = None) -> Any:
        """The field as it is, or `default` where it is missing or null."""
        self.read.add(name)
        found = self.hf.get(name)
        return default if found is None else found

    def count(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        found = self.value(name, default)
        if found is None:
            raise CheckpointError(f"config.json lacks {name}. Is this the model's complete config.json?")
        most = MOST.get(name, MAX_COUNT)
        if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= most:
            wanted = f"a positive whole number of at most {most:,}"
            raise CheckpointError(f"config.json: {name} is {short(found)}; it must be {wanted}.")
        return found

    def count_or_none(self, name: str, default: int | None = None) -> int | None:
        """A positive whole number; an explicit null means none, a missing field means `default`."""
        self.read.add(name)
        return None if self.hf.get(name, default) is None else self.count(name, default)

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        found = self.value(name, default)
        if not is_positive(found):
            raise CheckpointError(f"config.json: {name} is {short(found)}; it must be a positive number.")
        return float(found)

    def number_or_none(self, name: str, default: float | None = None) -> float | None:
        """A positive number; an explicit null means none, a missing field means `default`."""
        self.read.add(name)
        return None if self.hf.get(name, default) is None else self.number(name, default)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of positive numbers, empty when missing."""
        found = self.value(name, [])
        if not isinstance(found, list) or not all(map(is_positive, found)):
            raise CheckpointError(f"config.json: {name} is {short(found)}; it must be a list of positive numbers.")
        return tuple(map(float, found))

    def mapping(self, name: str) -> dict[str, Any]:
        """An object, empty when missing."""
        found = self.value(name, {})
        if not isinstance(found, dict):
            raise CheckpointError(f"config.json: {name} is {short(found)}; it must be an object.")
        return found

    def index(self, name: str, default: int) -> int:
        """A whole number of at least zero."""
        found = self.value(name, default)
        return 0 if found == 0 else self.count(name, default)

    def flag(self, name: str, default: bool) -> bool:
        found = self.value(name, default)
        if not isinstance(found, bool):
            raise CheckpointError(f"config.json: {name} is {short(found)}; it must be true or false.")
        return found

    def text(self, name: str) -> str:
        """A text, empty when missing."""
        found = self.value(name, "")
        if not isinstance(found, str):
            raise CheckpointError(f"config.json: {name} is {short(found)}; it must be a text.")
        return found

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        found = self.value(name, default)
        if found not in choices:
            raise CheckpointError(f"config.json: {name} is {short(found)}; supported: {', '.join(choices)}.")
        return found

    def of_layers[T](self, name: str, choices: tuple[T, ...], default: list[T]) -> list[T]:
        """A list with one of `choices` for each layer."""
        num_layers, found = self.count("num_hidden_layers"), self.value(name, default)
        if not isinstance(found, list) or len(found) != num_layers or not all(each in choices for each in found):
            raise CheckpointError(
                f"config.json: {name} is {short(found)}; it must have {num_layers} entries, each "
                f"{' or '.join(map(repr, choices))}."
            )
        return found

    def expect(self, values: Mapping[str, Any], of: str) -> None:
        """CheckpointError for a field that has another than its only supported value. `of`: whose that is."""
        for name, expected in values.items():
            found = self.value(name, expected)
            if found != expected or isinstance(found, bool) != isinstance(expected, bool):
                raise CheckpointError(f"config.json: {name} is {short(found)}; of {of} only {expected!r} is supported.")

    def refuse_unread(self) -> None:
        """CheckpointError for a field that nobody read, unless it changes nothing."""
        for name, found in self.hf.items():
            if name in self.read or changes_nothing(name, found):
                continue
            raise CheckpointError(
                f"config.json: {name} is {short(found)}. Nothing is known of this field, and it may change what the "
                "model computes. If it does not, remove it from config.json; if it does, the model is not supported."
            )


def load_hf_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder as a dictionary, or what it would say of a folder in Mistral's own format.
    CheckpointError when missing or not a JSON object."""
    path = Path(folder) / "config.json"
    if is_mistral_folder(Path(folder)):
        return description_of(Path(folder))
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        refuse_other_folder(Path(folder))
        raise CheckpointError(
            f"{path} does not exist. A model folder holds config.json, a tokenizer, and *.safetensors files."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}. Download the model again.") from error
    if not isinstance(hf, dict):
        raise CheckpointError(f"{path} holds a {type(hf).__name__}, not a JSON object. Download the model again.")
    refuse_part_of_pipeline(Path(folder), hf)
    refuse_adapter(Path(folder))
    return reading.with_description_beside(Path(folder), hf)


def common_fields(fields: HfFields, tie_default: bool = False, norm_eps: float = 1e-6) -> dict[str, Any]:
    """The part of DecoderConfig that every architecture spells alike, as keyword arguments."""
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads is {num_heads}, no multiple of num_key_value_heads, {num_kv_heads}."
        )
    hidden_size = fields.count("hidden_size")
    head_dim = fields.count("head_dim", max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim is {head_dim}; rotary embedding needs an even number.")
    return {
        "architecture": architecture_of(fields.hf),
        "num_layers": fields.count("num_hidden_layers"),
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.count("intermediate_size"),
        "vocab_size": fields.count("vocab_size"),
        "norm_eps": fields.number("rms_norm_eps", norm_eps),
        "tie_embeddings": fields.flag("tie_word_embeddings", tie_default),
        "query_scale": head_dim**-0.5,
        "dtype": dtype_of(fields.hf),
        "quantization": quantization_of(fields),
        **token_ids(fields),
    }


def quantization_of(fields: HfFields) -> Quantization | None:
    """How weights are stored, which a field of config.json says, or a file beside it. CheckpointError for what is not
    read."""
    found = {name: fields.value(name) for name in reading.FIELDS}
    place = next((name for name, given in found.items() if given), reading.FIELDS[0])
    return reading.quantization_of(found[place], place)


def layer_windows(fields: HfFields, window: int | None, sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of every layer: as `layer_types` says, or else `window` for the layers that `sliding(i)` names."""
    defaults = [SLIDING if sliding(i) else FULL for i in range(fields.count("num_hidden_layers"))]
    types = fields.of_layers("layer_types", (SLIDING, FULL), defaults)
    return tuple(window if kind == SLIDING else None for kind in types)


def telling(config: DecoderConfig) -> DecoderConfig:
    """The description of a model whose blocks of experts say which ones each token went to."""
    assert config.experts is not None, "the options were checked against the model"
    router = replace(config.experts.router, tells=True)
    return replace(config, experts=replace(config.experts, router=router))


def with_redundant(config: DecoderConfig, num_redundant: int) -> DecoderConfig:
    """A model whose experts have so many places more."""
    if config.experts is None:
        return config
    return replace(config, experts=replace(config.experts, num_redundant=num_redundant))


def without_rotation(config: DecoderConfig, numbers: set[int]) -> DecoderConfig:
    """The same model, of which the layers with these numbers do not rotate queries and keys."""
    layers = [replace(layer, rope=None) if i in numbers else layer for i, layer in enumerate(config.layers)]
    return replace(config, layers=tuple(layers))


def token_ids(fields: HfFields) -> dict[str, Any]:
    """`eos_token_ids` and `bos_token_id`; a checkpoint may have none, one, or several ids that end the text."""
    ids = {}
    for name in ("eos_token_id", "bos_token_id"):
        found = fields.value(name, [])
        ids[name] = tuple(found) if isinstance(found, list) else (found,)
        if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids[name]):
            raise CheckpointError(f"config.json: {name} is {short(found)}; it must be a token id or a list of them.")
    return {"eos_token_ids": ids["eos_token_id"], "bos_token_id": next(iter(ids["bos_token_id"]), None)}


def architecture_of(hf: dict[str, Any]) -> str:
    """The class name in `architectures`; CheckpointError when there is not exactly one."""
    names = hf.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(
            f'config.json: architectures is {short(names)}; it must name one class, such as ["LlamaForCausalLM"].'
        )
    return names[0]


def dtype_of(hf: dict[str, Any]) -> str:
    """The type of the checkpoint's weights, `dtype` or `torch_dtype`; float32 where nothing is said."""
    name = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if name not in ("bfloat16", "float16", "float32"):
        raise CheckpointError(f"config.json: dtype is {short(name)}; supported: bfloat16, float16, float32.")
    return name


def short(value: Any) -> str:
    """`value` as a message shows it: at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def facts_text(value: Any) -> str:
    """A description as a text that stays the same from version to version, to name what was computed with it.

    It is the `repr` of frozen dataclasses, with exceptions. A renamed field keeps its first name (`NAMED`).
    A field that came later (`LATER`) is left out while it has its default. A quantization says what names it.
    """
    if isinstance(value, Quantization):
        return value.facts
    if isinstance(value, tuple):
        return f"({', '.join(map(facts_text, value))}{',' if len(value) == 1 else ''})"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    given = ((each, getattr(value, each.name)) for each in fields(value))
    said = ((each, entry) for each, entry in given if LATER not in each.metadata or entry != each.default)
    facts = (f"{each.metadata.get(NAMED, each.name)}={facts_text(entry)}" for each, entry in said)
    return f"{type(value).__qualname__}({', '.join(facts)})"


HARMLESS_FIELDS = frozenset(
    """
    architectures model_type transformers_version torch_dtype dtype use_cache initializer_range auto_map name_or_path
    attention_dropout hidden_dropout resid_pdrop embd_pdrop classifier_dropout output_attentions output_hidden_states
    return_dict return_dict_in_generate torchscript tokenizer_class pad_token_id sep_token_id decoder_start_token_id
    finetuning_task task_specific_params max_length do_sample early_stopping output_scores remove_invalid_values
    chunk_size_feed_forward tf_legacy_loss use_bfloat16 attn_implementation pretraining_tp is_llama_config
    output_router_logits router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux residual_dropout
    hybrid_kvcache_attention_pattern unsloth_fixed unsloth_version transformers.js_config
    max_sequence_length model_max_length tokenizer_model_max_length
    _name_or_path _commit_hash _from_model_config _flash_attn_2_enabled _attn_implementation_autoset
    _attn_implementation_internal _pre_quantization_dtype
    """.split()
)
"""They are of training, of the form of results, or records."""

READ_BY_OTHERS = frozenset(
    """
    bos_token_id eos_token_id temperature top_k top_p repetition_penalty
    id2label label2id problem_type num_labels is_matryoshka matryoshka_dimensions sentence_transformers
    sbert_ce_default_activation_function
    """.split()
)
"""They say how texts end, how tokens are drawn (`engine/input/generation_config.py`), and what a pooled vector becomes
(`engine/pooling/pooler.py`)."""

NEUTRAL_VALUES: Mapping[str, Container[Any]] = {
    **dict.fromkeys(
        ("full_attn_mod", "interpolate_factor", "num_beams", "num_beam_groups", "num_return_sequences"), (1,)
    ),
    **dict.fromkeys(("typical_p", "length_penalty", "encoder_repetition_penalty"), (1,)),
    "cache_implementation": ("static", "dynamic", "hybrid", "hybrid_chunked", "sliding_window", "offloaded"),
}
"""Fields that change nothing as long as they have one of these values, or none: ways to draw tokens, and where a cache
lies."""

ON_UNLESS_SAID = frozenset(("is_causal", "causal", "use_causal_mask", "use_rope", "use_rotary"))
"""Fields of which false is the value that changes something: others are switched off by it, or empty."""

IMPLEMENTATION = re.compile(r"_\w+_implementation")
"""Names of fields that say which of several equal functions is called."""


def changes_nothing(name: str, value: Any) -> bool:
    """Whether a field that no architecture has read means the same as if it were not there."""
    if value is None or name in HARMLESS_FIELDS or name in READ_BY_OTHERS or IMPLEMENTATION.fullmatch(name):
        return True
    return name not in ON_UNLESS_SAID if not value else value in NEUTRAL_VALUES.get(name, ())
