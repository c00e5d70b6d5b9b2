"""What a tower gives to the rest: a `Vision`, a record of pure functions, which is `model.vision` of a model that sees.

    model = registry.model_for(hf)                     # or model_for(hf, language_model_only=True): vision is None
    config = model.config_from_hf(hf)                  # config.vision: the VisionConfig; None: nothing is seen
    params = load_params(model.param_specs(config, num_shards), config, folder, mesh, dtype)   # SeeingParams
    sizes = encode_sizes(config.vision, largest)       # the buckets
    batch = EncoderBatch(**pack, table_CV=table)       # pack = model.vision.pack(config.vision, pictures, size)
    embeds_EX = model.vision.encode(params.vision, config.vision, batch)   # [num_embeds(size), out_width]

There are two kinds of towers. A *fixed* one takes items of one size (`VisionConfig.item_pixels`), such as Gemma 3's
squares of 896 pixels; a size is a number of items, and an item gives `embeds_per_item` embeddings. A *patch* tower
takes patches of pictures of any size, one picture behind the other; a size is a number of patches, of which
`patches_per_embed` neighbours become one embedding. Both kinds give embeddings in the order of what they were given,
without gaps: the k-th picture's begin where those of the pictures before it end, and what comes after the last ones is
padding. Nothing of a picture depends on what else is in its batch.

A *picture*, or a moment of a video, is a pair: its uint8 pixels in `PictureLayout.pixels_shape`, and its grid, (items,
rows, columns) of embeddings. A picture of a fixed tower may be cut between items: `(pixels[i:j], (j - i, rows,
columns))` is a picture. A patch of a moment has `VisionConfig.frames` frames, one of a picture has one, which stands
for all; a batch has the one kind or the other.

The pixels become numbers by `table_CV` of the picture's processor, float32 [3, 256], so they are uint8 until then. The
tower computes in the type of its parameters, which gives its embeddings too.

Letters: I items, P patches, E embeddings of a batch, X numbers of an embedding, all levels one behind the other: D * (1
+ levels), C channels, V values of a pixel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import AbstractMesh, Mesh

from jaxpaged.multimodal.processors.base import Processor

Grid = tuple[int, int, int]
"""Items, rows and columns of a picture's embeddings."""
Picture = tuple[np.ndarray, Grid]
Features = Sequence[Any]
"""`messages.MultiModalFeature`s of a prompt, of which only offset, runs and grid are read."""

WINDOWS, ALL = "windows", "all"
FIXED_SIZES = (1, 2, 4, 8)
PATCH_SIZES = (256, 1024, 4096, 16_384)


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A tower. Static under jit. A family that has more to say has a subclass.

    `width`, `num_layers`, `num_heads`, `head_dim` and `columns` (of feed-forward blocks) are the tower's own.
    `out_width`: numbers of one level of an embedding, the decoder's width. `num_levels`: how many levels there are
    besides the first (DeepStack). `patch` is the side of a patch in pixels, `patches_per_embed` how many become one
    embedding, and `frames` how many frames of a video a patch has; 1 for towers that see pictures only. `item_pixels`:
    (height, width, 3) of every item of a fixed tower, `embeds_per_item` what one gives; None and 0 for patch towers.
    `both_ways`: the layers of the decoder in which the tokens of a run see each other both ways: none, those with a
    window (`WINDOWS`), or `ALL` of them.
    `splits_items`: every device has all weights, and a part of the items (`mm_encoder_tp_mode=data`); else weights are
    split wherever heads and columns can be.
    """

    family: str
    width: int
    num_layers: int
    num_heads: int
    head_dim: int
    columns: int
    patch: int
    out_width: int
    norm_eps: float
    activation: str
    num_levels: int = 0
    patches_per_embed: int = 1
    frames: int = 1
    item_pixels: tuple[int, int, int] | None = None
    embeds_per_item: int = 0
    splits_items: bool = False
    both_ways: str = ""

    @property
    def is_fixed(self) -> bool:
        """Whether every item has the same size."""
        return self.item_pixels is not None

    @property
    def embed_numbers(self) -> int:
        """Numbers of an embedding with all of its levels."""
        return self.out_width * (1 + self.num_levels)

    @property
    def patches_per_item(self) -> int:
        """Of a fixed tower, how many patches it computes for an item."""
        return (
            0 if self.item_pixels is None else (self.item_pixels[0] // self.patch) * (self.item_pixels[1] // self.patch)
        )

    def num_embeds(self, size: int) -> int:
        """Rows of what `encode` gives for a batch of so many items or patches."""
        return size * self.embeds_per_item if self.is_fixed else size // self.patches_per_embed

    def size_of(self, grid: Grid) -> int:
        """How many items or patches a picture with this grid takes in a batch."""
        items, rows, columns = grid
        return items if self.is_fixed else items * rows * columns * self.patches_per_embed

    def dim_sizes(self) -> dict[str, int]:
        """Letter -> size of that axis in the checkpoint, of letters that only towers have (`params/dims.py`)."""
        return {
            "d": self.width,
            "n": self.num_heads,
            "h": self.head_dim,
            "f": self.columns,
            "m": self.width * self.patches_per_embed,
            "g": self.patches_per_item,
            "b": 3,
            "r": self.patch,
            "s": self.patch,
        }

    def splits(self, num_shards: int) -> bool:
        """Whether weights are split over so many devices: if heads and columns can be, and are to be."""
        return not self.splits_items and self.num_heads % num_shards == 0 and self.columns % num_shards == 0


@struct.dataclass
class EncoderBatch:
    """What one run of an encode program gets besides the parameters.

    `pixels`: uint8, padded with zeros to the bucket: [I, height, width, 3], or [P, numbers of a patch], of one frame or
    of `VisionConfig.frames`, in the order channel, frame, row, column.
    `table_CV`: float32 [3, 256], the number that each value of each channel becomes; it stays on the devices.
    `of_patches`: of a patch tower, what the host computes for each patch or embedding, by name: positions, segments,
    orders; empty for fixed towers. `mesh`: the devices over which items are split, if they are (`splits_items`).
    """

    pixels: jax.Array
    table_CV: jax.Array
    of_patches: Mapping[str, jax.Array] = struct.field(default_factory=dict)
    mesh: Mesh | AbstractMesh | None = struct.field(pytree_node=False, default=None)


Shape = tuple[tuple[int, ...], str]
"""A shape and the name of a type."""


@dataclass(frozen=True)
class Vision:
    """One family of towers.

    `config_from_hf(hf)`, of the whole config.json -> VisionConfig; None where it describes a model of text only.
        CheckpointError for what is missing or not supported.
    `param_specs(config, num_shards)` -> pytree of Spec, with letters of `VisionConfig.dim_sizes` and D.
    `shapes(config, size, frames)` -> "pixels" and the names of `of_patches`, each with its shape and type, for a bucket
        of pictures; with `config.frames` in place of 1 for one of moments of videos.
    `pack(config, pictures, size)` -> numpy arrays of these names and shapes. The pictures' sizes (`size_of`) add up to
        `size` at most. Host code: no jax.
    `encode(params, config, batch)` -> [E, X] in the type of the parameters, E = `config.num_embeds(size)`.
    `rope_offsets(features, num_prompt_tokens)` -> (int32 [3, num_prompt_tokens], delta): what is added to each token's
        position to get its three rope positions, and to those of all tokens behind the prompt. Host code. None: plain
        positions.
    `processor`: of the checkpoint, once that is read: what makes pixels of pictures for this tower.
    """

    config_from_hf: Callable[[dict[str, Any]], VisionConfig | None]
    param_specs: Callable[[Any, int], Any]
    shapes: Callable[[Any, int, int], dict[str, Shape]]
    pack: Callable[[Any, Sequence[Picture], int], dict[str, np.ndarray]]
    encode: Callable[[Any, Any, EncoderBatch], jax.Array]
    rope_offsets: Callable[[Features, int], tuple[np.ndarray, int]] | None = None
    processor: Processor | None = None


def encode_sizes(config: VisionConfig, largest: int) -> tuple[int, ...]:
    """The buckets of a tower, of which the last one takes `largest` items or patches: the most that a run should take,
    and of a patch tower at least those of the largest picture.

    Pictures of a fixed tower are cut between items, so its buckets need no more than 8 of them.
    """
    if config.is_fixed:
        largest, sizes = min(largest, FIXED_SIZES[-1]), FIXED_SIZES
    else:
        largest, *sizes = (
            -(-size // config.patches_per_embed) * config.patches_per_embed for size in (largest, *PATCH_SIZES)
        )
    return tuple(size for size in sizes if size < largest) + (largest,)


def batch_of(packed: Mapping[str, Any], table_CV: Any, mesh: Mesh | AbstractMesh | None = None) -> EncoderBatch:
    """The batch of what `Vision.pack` gives, on the host or on devices, or of its shapes."""
    of_patches = {name: array for name, array in packed.items() if name != PIXELS}
    return EncoderBatch(packed[PIXELS], table_CV, of_patches, mesh)


PIXELS = "pixels"


def fixed_shapes(config: VisionConfig, size: int, frames: int = 1) -> dict[str, Shape]:
    """`Vision.shapes` of a fixed tower."""
    assert config.item_pixels is not None, f"{config.family} has no items of one size"
    assert frames == 1, f"{config.family} sees pictures only"
    return {PIXELS: ((size, *config.item_pixels), "uint8")}


def fixed_pack(config: VisionConfig, pictures: Sequence[Picture], size: int) -> dict[str, np.ndarray]:
    """`Vision.pack` of a fixed tower: items one behind the other."""
    ((name, (shape, dtype)),) = fixed_shapes(config, size).items()
    pixels = np.zeros(shape, dtype)
    start = 0
    for items, _ in pictures:
        pixels[start : start + len(items)] = items
        start += len(items)
    return {name: pixels}
