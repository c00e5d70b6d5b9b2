"""The encoder of an engine that sees, as far as options and a model's description say: no weight, no device memory."""

import math
from dataclasses import dataclass, replace

from jaxpaged.config import EngineConfig, settled
from jaxpaged.config.speculation import MODEL_METHODS, speculation_of
from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache_spec import EncoderCacheConfig
from jaxpaged.models.interface import Model
from jaxpaged.models.vision.interface import Grid, Vision, VisionConfig, encode_sizes

MOST_COPIED = 256
"""Embeddings that a program copies at a time, off the device and back."""
PAGE_EMBEDS = 64
"""Embeddings in a page of the encoder cache, where pictures have any number of them. Where all items have the same, a
page is an item."""


@dataclass(frozen=True)
class EncoderSpec:
    """`vision` is the tower's family and `config` its description, as the options want it. `sizes`: the buckets of
    encode programs; none where all embeddings are computed elsewhere. `largest`: the grid of the largest picture that
    the engine takes. `one_each`: a batch has one picture, in the bucket of its size, so that no bit depends on what
    else is encoded (`deterministic`). `takes_videos`: whether there are moments of videos to encode."""

    vision: Vision
    config: VisionConfig
    cache: EncoderCacheConfig
    sizes: tuple[int, ...]
    largest: Grid
    one_each: bool = False
    takes_videos: bool = False

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Slots, and numbers of an embedding."""
        return self.cache.num_pages * self.cache.page_size, self.config.embed_numbers

    @property
    def num_copied(self) -> int:
        """Embeddings that a program copies, off the device and back."""
        return min(max(MOST_COPIED, self.cache.page_size), self.cache_shape[0])


def check_together(config: EngineConfig) -> None:
    """Raise ConfigError for what is not combined with a tower."""
    parallel, drafting = config.parallel, speculation_of(config.speculative.speculative_config)
    given = {
        f"pipeline_parallel_size is {parallel.pipeline_parallel_size}": parallel.pipeline_parallel_size > 1,
        f"attention has {parallel.num_ranks} data-parallel ranks": parallel.num_ranks > 1,
        f"decode_context_parallel_size is {parallel.decode_context_parallel_size}": (
            parallel.decode_context_parallel_size > 1
        ),
        f"speculative_config asks for {drafting and drafting.method}": bool(drafting)
        and drafting.method in MODEL_METHODS,
    }
    if config.multimodal.ec_transfer is not None and parallel.num_processes > 1:
        raise ConfigError(
            f"ec_transfer_config names a folder of embeddings, and {parallel.num_processes} processes compute as one, "
            "with which it is not supported. Leave it out, or take one host."
        )
    if config.multimodal.enable_mm_embeds and parallel.num_processes > 1:
        raise ConfigError(
            f"enable_mm_embeds is True, and {parallel.num_processes} processes compute as one, with which it is not "
            "supported. Leave it out, or take one host."
        )
    for what, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"{what}, with which a model that sees is not supported. Leave its tower out (--language-model-only) "
                "or the option."
            )


def check_tower(config: EngineConfig, encoder: EncoderSpec | None) -> None:
    """Raise ConfigError where adapters are to adapt a tower, and cannot."""
    if encoder is None or not encoder.sizes:
        why = "no pictures are encoded here. Leave it out"
    elif encoder.config.splits_items:
        why = "mm_encoder_tp_mode is 'data', which splits pictures over devices, not weights. Leave one out"
    else:
        return
    raise ConfigError(f"enable_tower_connector_lora is given, but {why}.")


def encoder_spec(config: EngineConfig, model: Model, tower: VisionConfig, platform: str) -> EncoderSpec:
    """The encoder of a model that has a tower. Raises ConfigError for options that contradict the model."""
    vision, options = model.vision, config.multimodal
    assert vision is not None and vision.processor is not None, "a model that sees has a processor of pictures"
    largest = vision.processor.largest_grid
    tokens = settled(config.scheduler.max_num_batched_tokens)
    num_embeds = min(math.prod(largest), config.max_model_len)
    most = options.max_num_encoder_input_tokens or max(tokens, num_embeds)
    num_cached = options.encoder_cache_size or max(tokens, num_embeds)
    whole_spans = bool(tower.both_ways) or options.disable_chunked_mm_input
    span = tower.embeds_per_item if tower.is_fixed else num_embeds
    if whole_spans and span > tokens:
        why = "which see each other both ways" if tower.both_ways else "and disable_chunked_mm_input is set"
        raise ConfigError(
            f"max_num_batched_tokens is {tokens}, but a picture has {span} tokens in a row, {why}, so that they are "
            "computed in one step. Raise it, or leave the tower out (language_model_only)."
        )
    page_size = tower.embeds_per_item if tower.is_fixed else PAGE_EMBEDS
    cache = EncoderCacheConfig(-(-num_cached // page_size), page_size, most, whole_spans)
    one_each = config.compile.deterministic
    fits = min(num_embeds, most, cache.num_pages * page_size)
    if tower.is_fixed:
        if fits < tower.embeds_per_item:
            raise ConfigError(
                f"max_num_encoder_input_tokens or encoder_cache_size is {fits}, and a picture has "
                f"{tower.embeds_per_item} embeddings. Raise it."
            )
        most_items, largest = most // tower.embeds_per_item, (fits // tower.embeds_per_item, *largest[1:])
        is_one = platform == "cpu" or one_each  # cores have enough to do with one
        sizes = (1,) if is_one else encode_sizes(tower, most_items)
    else:
        largest = 1, 1, fits
        sizes = encode_sizes(tower, tower.size_of(largest))
        cache = cache if options.language_model_only else replace(cache, largest=fits)
    sizes, takes_videos = () if options.language_model_only else sizes, tower.frames > 1 and options.max_videos > 0
    return EncoderSpec(vision, tower, cache, sizes, largest, one_each, takes_videos)
