"""What an engine keeps free on each device before it counts KV blocks: the same for an engine and for a plan of one."""

from dataclasses import dataclass
from typing import Any

import jax

from jaxpaged.params.sharding import bytes_on_device, num_expert_devices, num_ranks
from jaxpaged.worker.context_split import merging_bytes
from jaxpaged.worker.programs.blueprint import Blueprint
from jaxpaged.worker.programs.compiler_options import tries_products
from jaxpaged.worker.programs.table import MOST_THREADS
from jaxpaged.worker.step.pooling import programs_for

SLACK_BYTES = 256 * 2**20
"""Of jax's pool on a GPU: it gives out whole pieces, and what is left between them may be of no use."""
TRIAL_MARGIN = 64 * 2**20
"""Around operands that XLA tries kernels with, to see whether any writes beyond them: 16 MiB for each of up to four."""
PAIR_ARRAYS = 3
"""Of what experts make of tokens, in float32: as it lies by expert, by token, and weighed."""


@dataclass(frozen=True)
class Reserve:
    """Bytes of one device. `temporaries` is an estimate from shapes, before anything is compiled."""

    weights: int
    state: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.temporaries


def reserve_of(blueprint: Blueprint) -> Reserve:
    """What the engine of a blueprint needs besides its KV blocks."""
    rows = (blueprint.demand.max_num_seqs + 1) * blueprint.division.row_bytes
    temporaries = temporary_bytes(blueprint)
    if blueprint.platform == "gpu":
        temporaries += SLACK_BYTES + trial_bytes(blueprint)
    return Reserve(blueprint.weight_bytes, state_bytes(blueprint) + rows, temporaries)


def trial_bytes(blueprint: Blueprint) -> int:
    """What XLA takes to time kernels for products while it compiles, beside the cache (`tries_products`): for each
    program that is compiled at a time, operands and result of the largest product."""
    if not tries_products(blueprint.platform, blueprint.config.model.quantization is not None):
        return 0
    tokens = blueprint.token_buckets[-1]
    decoders, itemsize = blueprint.decoders, blueprint.dtype.itemsize
    weight = max(each.hidden_size * each.columns_per_token for each in decoders) // blueprint.num_shards
    if has_head(blueprint):  # which keeps its type, and ends runs of decode steps
        head = blueprint.decoder.vocab_size * blueprint.decoder.hidden_size * itemsize // blueprint.num_shards
        weight = max(weight, head)
    activations = max(each.hidden_size + each.columns_per_token for each in decoders) * tokens * itemsize
    return MOST_THREADS * (weight + activations + TRIAL_MARGIN)


def state_bytes(blueprint: Blueprint) -> int:
    """What is kept from step to step besides KV blocks: block tables, last tokens, what sampling has seen or
    pooling has added up, and the hidden states of the last step. It does not depend on the number of KV blocks."""
    _, *state = programs_for(blueprint, blueprint.division.kv_cache(1)).shapes.state
    return sum(bytes_on_device(leaf) for leaf in jax.tree.leaves(state))


def temporary_bytes(blueprint: Blueprint) -> int:
    """Bytes of temporaries on each device, from shapes alone: an upper estimate. See `forward_bytes`.

    The sampler holds a few float32 [S, V] arrays at a time; stages before the last one have none.
    """
    if not has_head(blueprint):
        return forward_bytes(blueprint)
    num_seqs, vocab_size = blueprint.config.scheduler.max_num_seqs, blueprint.decoder.vocab_size
    return forward_bytes(blueprint) + (6 + blueprint.num_drafts) * num_seqs * vocab_size * 4


def forward_bytes(blueprint: Blueprint) -> int:
    """Of the largest step before tokens are drawn: a few [T, F] and [T, D] arrays at a time, and what `PAIR_ARRAYS`
    says. Compiled for TPUs, mixtures of experts take 0.85 to 0.87 of this with 2,048 tokens (libtpu 0.0.50)."""
    shards = blueprint.num_shards
    share = 2 if num_expert_devices(blueprint.mesh) > 1 else 1  # see `experts.pairs_at_once`
    per_token = max(3 * share * each.columns_per_token // shards + 8 * each.hidden_size for each in blueprint.decoders)
    pairs = max(PAIR_ARRAYS * each.pairs_per_token * each.hidden_size * 4 for each in blueprint.decoders)
    pairs *= num_ranks(blueprint.mesh)  # experts see the tokens of all
    merging = merging_bytes(blueprint.decoders, blueprint.attention)
    tokens = blueprint.config.scheduler.max_num_batched_tokens
    return tokens * (per_token * blueprint.dtype.itemsize + pairs + merging)


def has_head(blueprint: Blueprint) -> bool:
    """Whether tokens are drawn here: on a stage that is the last one, or where there are none."""
    return blueprint.stage is None or blueprint.stage.is_last


def looked_up(blueprint: Blueprint) -> list[Any]:
    """Parameters of which a pass over tokens reads single rows, or none: embeddings that are not the head too, and
    both tables of a model that drafts."""
    params: Any = blueprint.param_shapes
    pools = blueprint.config.model.runner == "pooling"
    decoder = params.decoder if pools or blueprint.draft is not None else params
    tables = [decoder.embed_tokens] if pools or not (blueprint.decoder.tie_embeddings and has_head(blueprint)) else []
    if blueprint.draft is not None:
        tables += [params.draft.embed_tokens, params.draft.lm_head]
    return jax.tree.leaves(tables)
