"""What an engine keeps free on each device before it counts KV blocks: the same for an engine and for a plan of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpaged.models.vision.attention import SCORES
from jaxpaged.params.sharding import bytes_on_device, num_expert_devices, num_ranks
from jaxpaged.worker.context_split import merging_bytes
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.programs.compiled import MOST_THREADS
from jaxpaged.worker.programs.compiler_options import tries_products
from jaxpaged.worker.programs.engine_programs import EnginePrograms

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


def reserve_of(spec: EngineSpec) -> Reserve:
    """What the engine of a spec needs besides its KV blocks."""
    rows = (spec.demand.max_num_seqs + 1) * spec.division.row_bytes
    temporaries = max(temporary_bytes(spec), encode_bytes(spec))  # one program at a time
    if spec.platform == "gpu":
        temporaries += SLACK_BYTES + trial_bytes(spec)
    return Reserve(spec.weight_bytes, state_bytes(spec) + rows, temporaries)


def planned_memory(stages: Sequence[EngineSpec], num_blocks: int) -> dict[str, int]:
    """Bytes of the device that has most to keep in an engine which is awake, by what for, and how many devices."""
    reserves, last = [reserve_of(stage) for stage in stages], stages[-1]
    of_pictures = {}
    if (encoder := last.encoder) is not None:
        slots, numbers = encoder.cache_shape
        of_pictures["encoder_cache_bytes"] = slots * numbers * last.dtype.itemsize
    return of_pictures | {
        "weight_bytes": max(reserve.weights for reserve in reserves),
        "state_bytes": max(reserve.state for reserve in reserves),
        "kv_cache_bytes": max(stage.division.num_bytes(num_blocks) for stage in stages),
        "num_devices": sum(stage.mesh.size for stage in stages),
    }


def trial_bytes(spec: EngineSpec) -> int:
    """What XLA takes to time kernels for products while it compiles, beside the cache (`tries_products`): for each
    program that is compiled at a time, operands and result of the largest product."""
    if not tries_products(spec.platform, spec.has_quantized):
        return 0
    tokens = spec.token_buckets[-1]
    decoders, itemsize = spec.decoders, spec.dtype.itemsize
    weight = max(each.hidden_size * each.columns_per_token for each in decoders) // spec.num_shards
    if spec.is_last:  # which keeps its type, and ends multi-step decodes
        head = spec.decoder.vocab_size * spec.decoder.hidden_size * itemsize // spec.num_shards
        weight = max(weight, head)
    activations = max(each.hidden_size + each.columns_per_token for each in decoders) * tokens * itemsize
    return MOST_THREADS * (weight + activations + TRIAL_MARGIN)


def state_bytes(spec: EngineSpec) -> int:
    """What is kept from step to step besides KV blocks: block tables, last tokens, what sampling has seen or
    pooling has added up, and the hidden states of the last step. It does not depend on the number of KV blocks."""
    _, *state = EnginePrograms(spec, spec.division.kv_cache(1)).shapes.state
    return sum(bytes_on_device(leaf) for leaf in jax.tree.leaves(state))


def temporary_bytes(spec: EngineSpec) -> int:
    """Bytes of temporaries on each device, from shapes alone: an upper estimate. See `forward_bytes`.

    The sampler holds a few float32 [S, V] arrays at a time; stages before the last one have none.
    """
    if not spec.is_last:
        return forward_bytes(spec)
    num_seqs, vocab_size = spec.config.scheduler.max_num_seqs, spec.decoder.vocab_size
    return forward_bytes(spec) + (6 + spec.num_drafts) * num_seqs * vocab_size * 4


def forward_bytes(spec: EngineSpec) -> int:
    """Of the largest step before tokens are drawn: a few [T, F] and [T, D] arrays at a time, and what `PAIR_ARRAYS`
    says. Compiled for TPUs, mixtures of experts take 0.85 to 0.87 of this with 2,048 tokens (libtpu 0.0.50)."""
    shards = spec.num_shards
    share = 2 if num_expert_devices(spec.mesh) > 1 else 1  # see `experts.pairs_at_once`
    per_token = max(3 * share * each.columns_per_token // shards + 8 * each.hidden_size for each in spec.decoders)
    pairs = max(PAIR_ARRAYS * each.pairs_per_token * each.hidden_size * 4 for each in spec.decoders)
    pairs *= num_ranks(spec.mesh)  # experts see the tokens of all
    merging = merging_bytes(spec.decoders, spec.attention)
    tokens = spec.config.scheduler.max_num_batched_tokens
    return tokens * (per_token * spec.dtype.itemsize + pairs + merging)


def encode_bytes(spec: EngineSpec) -> int:
    """Of the largest encode program of an engine that sees: a few arrays of all patches, those of a block of two
    products, scores in float32, and the embeddings."""
    if (encoder := spec.encoder) is None or not encoder.sizes:
        return 0
    tower, size, itemsize = encoder.config, encoder.sizes[-1], spec.dtype.itemsize
    patches = size * tower.patches_per_item if tower.is_fixed else size
    shards = spec.num_shards if tower.splits(spec.num_shards) or tower.splits_items else 1
    per_patch = (8 * tower.width + 3 * tower.columns // shards + 6 * tower.patch**2) * itemsize + 3 * tower.patch**2
    scores = 3 * 4 * min(SCORES, tower.num_heads * patches**2) // shards
    return patches * per_patch + scores + tower.num_embeds(size) * tower.embed_numbers * (4 + itemsize)


def looked_up(spec: EngineSpec) -> list[Any]:
    """Parameters of which a pass over tokens reads single rows, or none: embeddings that are not the head too, and
    both tables of a model that drafts."""
    if spec.encodes_only:
        return []
    params: Any = spec.param_shapes
    pools = spec.config.model.runner == "pooling"
    decoder = params.decoder if pools or spec.draft is not None else params
    if spec.encoder is not None:
        decoder = decoder.decoder
    tables = [decoder.embed_tokens] if pools or not (spec.decoder.tie_embeddings and spec.is_last) else []
    if spec.draft is not None:
        tables += [params.draft.embed_tokens, params.draft.lm_head]
    return jax.tree.leaves(tables)
