"""The options of pictures in prompts: how many, from where, how they are processed, cached and encoded.

This module knows no model: whether one sees, and what its processor takes, is found when the model is read.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.config.ec_transfer import ECTransfer, read_ec_transfer
from jaxpaged.config.option_checks import option
from jaxpaged.config.video_options import video_options_of
from jaxpaged.errors import ConfigError, did_you_mean, shown

logger = logging.getLogger(__name__)

GIB = 1 << 30
MODALITIES = ("image", "video", "audio", "vision_chunk")
"""vLLM's names. Images and videos are taken; limits of the others may be given."""
MOST_PICTURES = 999
"""Of a prompt, where nothing is said, and of videos as well: vLLM's number."""
WHITE = (255, 255, 255)
SHARE_OF_CORES = 0.25
"""Of `mm_bytes_in_flight_gb`: what all engine cores in processes of their own may keep of processed pictures."""


@dataclass(frozen=True)
class MultiModalConfig:
    """Pictures in prompts. Guide: guides/images.md."""

    limit_mm_per_prompt: dict[str, Any] = option(
        {},
        'most pictures and videos of a prompt, as JSON such as \'{"image": 2, "video": 1}\'; 0 takes none (default: '
        f"{MOST_PICTURES} of each)",
    )
    mm_processor_kwargs: dict[str, Any] = option(
        {},
        "how pictures are processed, as JSON: do_pan_and_scan, ... of Gemma 3, min_pixels, max_pixels of Qwen-VL; in "
        "place of what preprocessor_config.json says",
    )
    media_io_kwargs: dict[str, Any] = option(
        {},
        'how pictures are decoded, and how the frames of videos follow one another, as JSON: \'{"image": '
        '{"rgba_background_color": [255, 255, 255]}, "video": {"fps": 2.0, "num_frames": 16}}\'',
    )
    mm_processor_cache_gb: float = option(
        4.0,
        "GiB of processed pictures that are kept for later requests, in so far as mm_bytes_in_flight_gb leaves room; "
        "0 keeps none",
        minimum=0,
    )
    mm_bytes_in_flight_gb: float = option(
        4.0,
        "GiB that all pictures take in the memory of the host together: files, decoded and processed ones, those in "
        "engine cores too. Beyond it requests wait",
        above=0.0,
    )
    num_media_processes: int = option(
        2, "processes that decode and resize pictures; started when the first picture comes", minimum=1, maximum=256
    )
    max_num_encoder_input_tokens: int | None = option(
        None,
        "most embeddings that the encoder computes in a step (default: max_num_batched_tokens, or the largest picture "
        "if that has more)",
        minimum=1,
    )
    encoder_cache_size: int | None = option(
        None,
        "embeddings of pictures that are kept on the device (default: max_num_batched_tokens, or the largest picture "
        "if that has more)",
        minimum=1,
    )
    disable_chunked_mm_input: bool = option(
        False, "never compute a part of a picture in a step and the rest in later ones"
    )
    mm_encoder_tp_mode: str = option(
        "weights",
        "how several devices share the encoder: a part of its weights each, or a part of the pictures (data)",
        choices=("weights", "data"),
    )
    language_model_only: bool = option(
        False,
        "load only the language model of a checkpoint that sees: it takes no pictures; with enable_mm_embeds it takes "
        "their embeddings",
    )
    mm_encoder_only: bool = option(
        False,
        "load only the encoder, to compute embeddings for the engines that share the folder of ec_transfer_config; "
        "requests end without text",
    )
    ec_transfer_config: dict[str, Any] = option(
        {},
        "a folder in which engines share embeddings of pictures, as vLLM's JSON: its ec_connector is the "
        "ECExampleConnector",
    )
    enable_mm_embeds: bool = option(
        False, "take embeddings in place of pictures, from callers who are trusted: wrong ones give any answer"
    )
    interleave_mm_strings: bool = option(
        False, "leave pictures of a chat where they stand among its texts, for templates that know only texts"
    )
    allowed_local_media_path: str = option(
        "", "folder below which requests to a server may name pictures by file: URLs"
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "hosts from which pictures may be fetched by http: and https: URLs; '*' for any (default: none)",
        several=True,
    )

    def __post_init__(self) -> None:
        for modality, limit in self.limit_mm_per_prompt.items():
            check_limit(modality, limit)
        background_of(self.media_io_kwargs)
        video_options_of(self.media_io_kwargs)
        if self.ec_transfer is not None and self.language_model_only:
            raise ConfigError(
                "ec_transfer_config names a folder of embeddings, and language_model_only leaves out what makes them. "
                "Give one of them."
            )
        if self.mm_encoder_only and (
            self.ec_transfer is None or not self.ec_transfer.saves or not self.ec_transfer.folder
        ):
            raise ConfigError(
                "mm_encoder_only is True, but ec_transfer_config does not say where embeddings go. Give it with the "
                "ec_role ec_producer, or leave mm_encoder_only out."
            )
        if self.enable_mm_embeds and self.mm_encoder_only:
            raise ConfigError(
                "enable_mm_embeds and mm_encoder_only are True, but embeddings are for engines that have more than an "
                "encoder. Leave one of them out."
            )

    @property
    def max_pictures(self) -> int:
        """Of a prompt."""
        return self._limit("image")

    @property
    def max_videos(self) -> int:
        """Of a prompt."""
        return self._limit("video")

    def _limit(self, modality: str) -> int:
        limit = self.limit_mm_per_prompt.get(modality, MOST_PICTURES)
        return int(limit.get("count", MOST_PICTURES) if isinstance(limit, Mapping) else limit)

    def core_cache_bytes(self, num_cores: int) -> int:
        """Of processed pictures, which each of so many engine cores in processes of their own keeps, so that front ends
        send a picture once."""
        return int(min(self.mm_processor_cache_gb, self.mm_bytes_in_flight_gb * SHARE_OF_CORES / num_cores) * GIB)

    @property
    def ec_transfer(self) -> ECTransfer | None:
        """The folder in which engines share embeddings, if there is one."""
        return read_ec_transfer(self.ec_transfer_config)

    @property
    def background(self) -> tuple[int, int, int]:
        """Red, green and blue on which transparent pixels are laid."""
        return background_of(self.media_io_kwargs)


def check_limit(modality: Any, limit: Any) -> None:
    """Raise ConfigError for a limit that is neither a number nor vLLM's object with one."""
    if modality not in MODALITIES:
        raise ConfigError(
            f"limit_mm_per_prompt has the unknown key {shown(modality)}.{did_you_mean(str(modality), MODALITIES)} "
            f"Known are {', '.join(MODALITIES)}."
        )
    count = limit.get("count", MOST_PICTURES) if isinstance(limit, Mapping) else limit
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ConfigError(
            f"limit_mm_per_prompt has {shown(limit)} for {modality}; it must be a whole number from 0, or an object "
            "with one as its count."
        )
    if isinstance(limit, Mapping) and (sizes := set(limit) - {"count"}):
        logger.warning(
            "limit_mm_per_prompt: %s of %s changes nothing: memory is planned for the largest picture that the "
            "processor gives.",
            ", ".join(sorted(map(str, sizes))),
            modality,
        )


def background_of(media_io_kwargs: Mapping[str, Any]) -> tuple[int, int, int]:
    """The colour behind transparent pixels. Raises ConfigError for a key that means nothing here."""
    for modality, values in media_io_kwargs.items():
        if not isinstance(values, Mapping):
            raise ConfigError(f"media_io_kwargs has {shown(values)} for {shown(modality)}; it must be an object.")
        if values and modality not in ("image", "video"):
            raise ConfigError(
                f"media_io_kwargs has the key {shown(modality)}; only 'image' and 'video' are taken. Leave it out."
            )
    of_images = media_io_kwargs.get("image", {})
    for name in of_images:
        if name not in ("rgba_background_color", "image_mode"):
            raise ConfigError(
                f"media_io_kwargs.image has the unknown key {shown(name)}. Known is rgba_background_color."
            )
    if (mode := of_images.get("image_mode", "RGB")) != "RGB":
        raise ConfigError(f"media_io_kwargs.image.image_mode is {shown(mode)}; pictures become 'RGB'. Leave it out.")
    colour = of_images.get("rgba_background_color", WHITE)
    whole = isinstance(colour, list | tuple) and all(type(each) is int and 0 <= each <= 255 for each in colour)
    if not whole or len(colour) != 3:
        raise ConfigError(
            f"media_io_kwargs.image.rgba_background_color is {shown(colour)}; it must be three numbers from 0 to 255."
        )
    return colour[0], colour[1], colour[2]
