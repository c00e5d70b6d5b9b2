"""Parameters of blocks of experts, by letters under their Hugging Face names, and what config.json says of them.

Used beside `decoder_specs` by every architecture that has experts.
"""

from collections.abc import Sequence
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.experts import SIGMOID, Experts, RouterConfig
from jaxpaged.layers.linear import Linear
from jaxpaged.layers.mlp import Mlp
from jaxpaged.models.config import DecoderConfig, ExpertsConfig, HfFields, short
from jaxpaged.models.decoder import mlp_with_bias, plain_mlp
from jaxpaged.params.spec import Spec

CORRECTION = "gate.e_score_correction_bias"
"""What the numbers are mostly called that are added to scores where experts are chosen."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""What the three matrices of an expert are called, unless an architecture calls them something else."""


def expert_specs(
    config: DecoderConfig,
    name: str,
    projections: tuple[str, str, str] = PROJECTIONS,
    *,
    shared: str | None = None,
    shared_gate: str | None = None,
    router: str = "gate",
    correction: str | None = None,
) -> Experts:
    """Specs of one block. `shared` is the name of the experts of all tokens, where the model has some, `shared_gate`
    that of their gate, `router` that of what chooses, and `correction` that of what is added to its scores.

    What chooses and weighs experts stays in float32, also where other weights are rounded.
    """
    assert config.experts is not None, "a block of experts needs its sizes"
    gate, up, down = (f"{name}.experts.{{}}.{projection}.weight" for projection in projections)
    return Experts(
        router=Linear(Spec("ED", "E D", f"{name}.{router}.weight", dtype="float32")),
        gate_proj=Linear(Spec("eQD", "E Q D", gate)),
        up_proj=Linear(Spec("eQD", "E Q D", up)),
        down_proj=Linear(Spec("eDQ", "E D Q", down)),
        correction=Spec("E", "E", f"{name}.{correction}", dtype="float32") if correction else None,
        shared=shared_mlp(f"{name}.{shared}") if shared and config.experts.shared_width else None,
        shared_gate=Spec("D", "1 D", f"{name}.{shared_gate}.weight", dtype="float32") if shared_gate else None,
    )


def stacked_expert_specs(
    name: str, router: str = "gate", shared: Mlp | None = None, transposed: bool = True
) -> Experts:
    """Specs of a block whose experts are one tensor, with gate and up projections end to end; `transposed`: inputs
    before outputs. `router` is the name of what chooses, `shared` the experts of all tokens."""

    def gate_or_up(part: int) -> Linear:
        tensor = f"{name}.experts.gate_up_proj"
        return Linear(Spec("eQD", "E Q D", tensor, fused=("Q", "Q"), part=part, fused_axis=1, transposed=transposed))

    return Experts(
        router=Linear(Spec("ED", "E D", f"{name}.{router}.weight", dtype="float32")),
        gate_proj=gate_or_up(0),
        up_proj=gate_or_up(1),
        down_proj=Linear(Spec("eDQ", "E D Q", f"{name}.experts.down_proj", transposed=transposed)),
        shared=shared,
    )


def feed_forward_specs(config: DecoderConfig, name: str, layer: int, **block: Any) -> Mlp | Experts:
    """Specs of the feed-forward block of a layer: of experts, of which `block` says more, where the layer has them."""
    if layer not in config.sparse_layers:
        return mlp_with_bias(config, f"{name}.mlp")
    return expert_specs(config, f"{name}.mlp", **block)


def shared_mlp(name: str) -> Mlp:
    return plain_mlp(name, "O")


def sigmoid_router(
    fields: HfFields, per_token: int = 8, num_groups: int = 1, groups_per_token: int = 1, scale: float = 1.0
) -> RouterConfig:
    """Of sigmoids with a correction, as DeepSeek-V3 has it (arXiv 2412.19437, section 2.1.2); numbers are defaults."""
    return RouterConfig(
        fields.count("num_experts_per_tok", per_token),
        SIGMOID,
        is_normalised=fields.flag("norm_topk_prob", True),
        num_groups=fields.count("n_group", num_groups),
        groups_per_token=fields.count("topk_group", groups_per_token),
        scale=fields.number("routed_scaling_factor", scale),
    )


def check_experts(experts: ExpertsConfig) -> ExpertsConfig:
    """The same; CheckpointError for more experts or groups of a token than there are."""
    router = experts.router
    if router.experts_per_token > experts.num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok is {router.experts_per_token}, but there are {experts.num_experts} "
            "experts. Is this the model's own config.json?"
        )
    per_group, remainder = divmod(experts.num_experts, router.num_groups)
    if remainder or router.groups_per_token > router.num_groups:
        raise CheckpointError(
            f"config.json: n_group {router.num_groups} and topk_group {router.groups_per_token} do not fit "
            f"{experts.num_experts} experts. Is this the model's own config.json?"
        )
    if router.experts_per_token > per_group * router.groups_per_token:
        raise CheckpointError(
            f"config.json: num_experts_per_tok is {router.experts_per_token}, but the groups of a token have "
            f"{per_group * router.groups_per_token} experts. Is this the model's own config.json?"
        )
    return experts


def sparse_layers(fields: HfFields) -> tuple[int, ...]:
    """Layers with experts, as Qwen counts them: every `decoder_sparse_step`th but `mlp_only_layers`."""
    step, dense = fields.count("decoder_sparse_step", 1), fields.value("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise CheckpointError(f"config.json: mlp_only_layers is {short(dense)}; it must be a list of layers.")
    return tuple(i for i in range(fields.count("num_hidden_layers")) if (i + 1) % step == 0 and i not in dense)


DENSE, SPARSE = "dense", "sparse"
"""What `mlp_layer_types` says of a layer."""


def layers_by_type(fields: HfFields, default: Sequence[int]) -> tuple[int, ...]:
    """Layers with experts: as `mlp_layer_types` says, or else the default."""
    defaults = [SPARSE if i in default else DENSE for i in range(fields.count("num_hidden_layers"))]
    types = fields.of_layers("mlp_layer_types", (DENSE, SPARSE), defaults)
    return tuple(i for i, kind in enumerate(types) if kind == SPARSE)


def no_windows(fields: HfFields) -> Sequence[None]:
    """That every layer sees all tokens. CheckpointError where windows are switched on: published models have none."""
    if fields.flag("use_sliding_window", False):
        raise CheckpointError("config.json: use_sliding_window is true; with experts, windows are not supported.")
    fields.read |= {"sliding_window", "max_window_layers", "layer_types"}
    return [None] * fields.count("num_hidden_layers")
