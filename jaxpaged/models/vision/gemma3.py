"""Gemma 3's tower: SigLIP's, and a projector that averages squares of patches (arXiv 2503.19786).

Embeddings go into the language model as they are: unlike those of text they are not multiplied by sqrt(D).

Letters: I items, R and C rows and columns of embeddings, Q and U of patches within an embedding; P patches, E
embeddings, X numbers of a vector.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.linear import Linear, apply_linear
from jaxpaged.layers.norm import Norm, NormConfig, rms_norm
from jaxpaged.models.config import HfFields
from jaxpaged.models.vision.interface import ALL, EncoderBatch, Vision, VisionConfig, fixed_pack, fixed_shapes
from jaxpaged.models.vision.parts import placed, vision_fields
from jaxpaged.models.vision.siglip import Tower, sizes_from_hf, tower, tower_specs
from jaxpaged.params.sharding import MODEL_AXES
from jaxpaged.params.spec import Spec


@struct.dataclass
class Gemma3Tower:
    tower: Tower
    soft_emb_norm: Norm
    input_projection: Linear  # [D, d]


def config_from_hf(hf: dict[str, Any]) -> VisionConfig | None:
    """Of Gemma 3's config.json; None where it has no `vision_config`."""
    fields = vision_fields(hf)
    if fields is None:
        return None
    sizes = sizes_from_hf(fields)
    num_embeds = HfFields(hf).count("mm_tokens_per_image", 256)
    side, patches = math.isqrt(num_embeds), sizes["item_pixels"][0] // sizes["patch"]
    if side * side != num_embeds or patches % side:
        raise CheckpointError(
            f"config.json: mm_tokens_per_image is {num_embeds}; it must be the square of a divisor of {patches}, the "
            "patches on a side of a picture."
        )
    return VisionConfig(
        family="gemma3",
        both_ways=ALL,
        out_width=HfFields(hf.get("text_config") or {}).count("hidden_size", 2304),
        patches_per_embed=(patches // side) ** 2,
        embeds_per_item=num_embeds,
        **sizes,
    )


def param_specs(config: VisionConfig, num_shards: int) -> Gemma3Tower:
    projection = Spec("Dd", "D d", f"{PROJECTOR}.mm_input_projection_weight", transposed=True)
    specs = Gemma3Tower(
        tower_specs(config, "vision_tower"),
        Norm(Spec("d", "d", f"{PROJECTOR}.mm_soft_emb_norm.weight")),
        Linear(projection),
    )
    return placed(specs, config, num_shards)


PROJECTOR = "multi_modal_projector"


def encode(params: Gemma3Tower, config: VisionConfig, batch: EncoderBatch) -> jax.Array:
    """[E, D]: `Vision.encode`. Where devices split items they need nothing of each other."""
    embed = partial(embeddings, config=config)
    if batch.mesh is None or len(batch.pixels) % batch.mesh.size:
        return embed(params, batch.pixels, batch.table_CV)
    own, all_of_it = PartitionSpec(MODEL_AXES), PartitionSpec()
    of_device = jax.shard_map(
        embed, mesh=batch.mesh, in_specs=(all_of_it, own, all_of_it), out_specs=own, check_vma=False
    )
    return of_device(params, batch.pixels, batch.table_CV)


def embeddings(params: Gemma3Tower, pixels: jax.Array, table_CV: jax.Array, config: VisionConfig) -> jax.Array:
    """The tower's vectors, averaged over squares in float32, normalised, and made as wide as the decoder."""
    x = tower(params.tower, config, pixels, table_CV)
    side, inside = math.isqrt(config.embeds_per_item), math.isqrt(config.patches_per_embed)
    cells_IRQCUX = x.reshape(len(pixels), side, inside, side, inside, config.width)
    mean_EX = cells_IRQCUX.astype(jnp.float32).mean((2, 4)).astype(x.dtype).reshape(-1, config.width)
    normed_EX = rms_norm(mean_EX, params.soft_emb_norm, NormConfig(config.norm_eps, is_offset=True))
    return apply_linear("Td,Dd->TD", normed_EX, params.input_projection)


GEMMA3_VISION = Vision(
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    shapes=fixed_shapes,
    pack=fixed_pack,
    encode=encode,
)
