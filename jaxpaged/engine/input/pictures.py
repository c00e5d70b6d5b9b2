"""Pictures of prompts, from what callers give to what the engine core takes: found, checked, processed, cached, placed.

Blocking calls, for threads: they wait for room in the budget of bytes, for remote servers, and for the processes that
decode. An event loop gives them to `threads`. This module knows neither samplers nor schedulers.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.config.multimodal import MultiModalConfig, background_of
from jaxpaged.engine.input.picture_parts import PictureOptions
from jaxpaged.engine.input.placeholders import Placed, Placeholders
from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.errors import ConfigError, RequestError, shown
from jaxpaged.messages import MultiModalFeature
from jaxpaged.multimodal.budget import ByteBudget
from jaxpaged.multimodal.decoding import PictureLimits, picture_size
from jaxpaged.multimodal.embeddings import Embeddings, Form, embeds_digest, in_form, read
from jaxpaged.multimodal.fetching import FetchLimits, MediaFetcher
from jaxpaged.multimodal.headers import read_header
from jaxpaged.multimodal.identity import options_on, picture_key, source_digest
from jaxpaged.multimodal.pictures import base64_bytes, data_url_bytes, image_pixels
from jaxpaged.multimodal.processes import KeyedPicture, PictureProcesses
from jaxpaged.multimodal.processor_cache import ProcessorCache, item_digest
from jaxpaged.multimodal.processors import processor_of, with_engine_options
from jaxpaged.multimodal.processors.base import PictureLayout, Processor
from jaxpaged.multimodal.sources import PictureSource
from jaxpaged.multimodal.thumbnails import thumbnail

GIB = 1 << 30
HEAD_BYTES = 1 << 18
THREADS_PER_PROCESS = 8
"""Threads that wait: for bytes in flight, for remote servers, for a process that decodes."""


@dataclass(frozen=True)
class Loaded:
    """A picture whose bytes are here, and their digest. Of embeddings the content is what the engine takes, of that
    `layout`."""

    source: PictureSource
    content: bytes | np.ndarray
    digest: bytes
    layout: PictureLayout | None = None


@dataclass(frozen=True)
class InspectedPicture:
    """A picture that was not decoded: its size, what it becomes, and the key that block hashes have of it."""

    width: int
    height: int
    layout: PictureLayout
    key: bytes


@dataclass(frozen=True)
class Wanted:
    """How a request's pictures are processed: the options for a process, all that decides the pixels, and the salt."""

    kwargs: Mapping[str, Any]
    chosen: Mapping[str, Any]
    background: tuple[int, int, int]
    salt: str | None


class PictureIntake:
    """The pictures of one model. `local_files`: callers are of this process, and may name files by their paths.
    `embeds`: the form of embeddings in place of pictures; None: they are not taken.

    Raises CheckpointError for a processor that cannot be read, ConfigError for options that it does not take.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: MultiModalConfig,
        identity: str,
        hf_config: Mapping[str, Any],
        preprocessor_config: Mapping[str, Any],
        *,
        local_files: bool = False,
        embeds: Form | None = None,
    ):
        self.config = config
        self.local_files = local_files
        self.embeds = embeds
        self._identity = identity
        self.limits = PictureLimits()
        self._base: Processor = processor_of(hf_config, preprocessor_config)
        self.processor = with_engine_options(self._base, config.mm_processor_kwargs)
        self.placeholders = Placeholders(tokenizer, self.processor)
        self.cache = ProcessorCache(int(config.mm_processor_cache_gb * GIB))
        self.budget = ByteBudget(int(config.mm_bytes_in_flight_gb * GIB), self.cache.evict)
        self._fetcher = MediaFetcher(
            config.allowed_media_domains, config.allowed_local_media_path, FetchLimits(self.limits.max_bytes)
        )
        self._processes = PictureProcesses(
            identity, hf_config, preprocessor_config, config.num_media_processes, self.limits
        )
        num_threads = THREADS_PER_PROCESS * config.num_media_processes
        self.threads = ThreadPoolExecutor(num_threads, "pictures")
        """For whole calls of this class."""
        self._workers = ThreadPoolExecutor(config.num_media_processes, "decoding")
        largest = self.processor.layout(4096, 4096, "a picture")
        self._processed_bytes = int(np.prod(largest.pixels_shape))  # as a rule, the most
        self._under_way: dict[bytes, Future[KeyedPicture]] = {}
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether pictures are taken."""
        return self.config.max_pictures > 0

    def check_number(self, sources: Sequence[PictureSource]) -> None:
        """Raise RequestError for pictures that are not taken, or too many of them, and for embeddings in place of
        pictures unless they are."""
        for source in sources:
            if source.embeddings is not None and self.embeds is None:
                raise RequestError(
                    f"{source.field} has floating point numbers, which are embeddings in place of a picture, and the "
                    "engine was started without enable_mm_embeds. Give the picture, an array as uint8.",
                    source.field,
                )
            if self.config.language_model_only and source.embeddings is None and source.is_given:
                raise RequestError(
                    f"{source.field} is a picture, but the engine was started with language_model_only. Give its "
                    "embeddings.",
                    source.field,
                )
        most = self.config.max_pictures
        if sources and not most:
            field = sources[0].field
            raise RequestError(f"{field} is a picture, but limit_mm_per_prompt is 0 for images. Leave it out.", field)
        if len(sources) > most:
            raise RequestError(
                f"the prompt has {len(sources)} pictures, and may have {most} (limit_mm_per_prompt). Send fewer.",
                sources[most].field,
            )

    def items(self, sources: Sequence[PictureSource], options: PictureOptions) -> list[KeyedPicture]:
        """The processed pictures, in order. Raises RequestError that names the field at fault, or FetchError."""
        self.check_number(sources)
        wanted = self._wanted(options)
        found = [self._named(source, wanted) for source in sources]
        missing = [self._opened(source) for source, item in zip(sources, found, strict=True) if item is None]
        if not missing:
            return [item for item in found if item is not None]
        need = sum(self._need(source) for source in missing)
        with self.budget.reserve(need, missing[0].field, options.make_room):
            made = iter(self._made(missing, wanted))
            return [next(made) if item is None else item for item in found]

    def _wanted(self, options: PictureOptions) -> "Wanted":
        """How the pictures of a request are processed. Raises RequestError."""
        kwargs, processor = self._with(options.processor_kwargs)
        try:
            background = background_of(options.io_kwargs) if options.io_kwargs else self.config.background
        except ConfigError as error:
            raise RequestError(str(error), "media_io_kwargs") from None
        return Wanted(kwargs, options_on(processor.options, background), background, options.salt)

    def _with(self, processor_kwargs: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], Processor]:
        """All options that a request with these has, and its processor. Raises RequestError."""
        if not processor_kwargs:
            return self.config.mm_processor_kwargs, self.processor
        kwargs = {**self.config.mm_processor_kwargs, **processor_kwargs}
        return kwargs, self._base.with_options(kwargs, "mm_processor_kwargs")

    def inspect(self, data: bytes, field: str, processor_kwargs: Mapping[str, Any] | None = None) -> "InspectedPicture":
        """What a file's picture will be, from its bytes and its header. Nothing is decoded. Raises RequestError."""
        _, processor = self._with(processor_kwargs)
        width, height = picture_size(data, field, self.limits)
        layout = processor.layout(width, height, field)
        options = options_on(processor.options, self.config.background)
        key = picture_key(self._identity, "image", options, layout, source_digest(data))
        return InspectedPicture(width, height, layout, key)

    def thumbnail(self, key: bytes) -> np.ndarray | None:
        """uint8 [H, W, 3], small, of a picture as its encoder sees it; None where the processor cache lacks it."""
        item = self.cache.find(key)
        return None if item is None or item.is_embeds else thumbnail(item.pixels, item.layout)

    def close(self) -> None:
        """End the processes and threads. Pictures under way fail."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self._workers.shutdown(wait=False, cancel_futures=True)
        self.budget.close()
        self._processes.close()

    # ---- one picture

    def _named(self, source: PictureSource, wanted: "Wanted") -> KeyedPicture | None:
        """A picture that only its name is given of, from the cache. None: it is there, and has to be read.

        Raises RequestError where the cache lacks it.
        """
        if source.is_given or source.uuid is None:
            return None
        digest = self.cache.named(source.uuid, wanted.salt)
        item = None if digest is None else self.cache.get(item_digest(digest, wanted.chosen))
        if item is None:
            raise RequestError(
                f"{source.field} has only a uuid, and no picture of that name is in the cache. Send it again.",
                source.field,
            )
        return item

    def _opened(self, source: PictureSource) -> PictureSource:
        """A data URL as the bytes that it holds: they take less than it; embeddings as an array. Raises
        RequestError."""
        if source.embeddings is not None:
            return replace(source, embeddings=self._read_embeds(source.embeddings, source.field))
        if source.url is None or source.url[:5].lower() != "data:":
            return source
        return replace(source, url=None, data=data_url_bytes(source.url, source.field, self.limits))

    def _read_embeds(self, given: Embeddings, field: str) -> Embeddings:
        assert self.embeds is not None, "`check_number` refuses embeddings"
        for each in given:
            if isinstance(each, bytes):
                self.limits.check_bytes(len(each), field)
        opened = [base64_bytes(each, field, self.limits) if isinstance(each, str) else each for each in given]
        return read(Embeddings(*opened), field, self.embeds)

    def _need(self, source: PictureSource) -> int:
        """Bytes that a picture takes at most while it is read, decoded and processed. Raises RequestError."""
        num_bytes, size = self.limits.max_bytes, None
        if source.embeddings is not None:
            assert self.embeds is not None, "`check_number` refuses embeddings"
            num_embeds, numbers = source.embeddings.values.shape
            return source.embeddings.values.nbytes + num_embeds * numbers * self.embeds.dtype.itemsize
        if source.data is not None:
            self.limits.check_bytes(len(source.data), source.field)
            header = read_header(source.data)
            num_bytes, size = len(source.data), (header.width, header.height) if header else (0, 0)
        elif source.array is not None:
            num_bytes, size = source.array.nbytes, source.array.shape[1::-1] if source.array.ndim >= 2 else (0, 0)
        elif source.image is not None:
            num_bytes, size = 0, source.image.size
        elif source.path is not None:
            num_bytes, size = size_of_path(source.path, source.field)
        if size is not None and min(size) > 0:
            self.limits.check_size(*size, source.field)
        num_pixels = self.limits.max_pixels if size is None else size[0] * size[1]
        return num_bytes + 3 * num_pixels + self._processed_bytes

    def _made(self, sources: Sequence[PictureSource], wanted: "Wanted") -> list[KeyedPicture]:
        """Pictures that have to be read, of which several may be under way at a time."""
        loaded = [self._loaded(source, wanted) for source in sources]
        for each in loaded:
            if each.source.uuid is not None:
                self.cache.bind(each.source.uuid, wanted.salt, each.digest, each.source.field)
        started = [self._started(each, wanted) for each in loaded]
        items = []
        for each, (future, is_own) in zip(loaded, started, strict=True):
            try:
                items.append(future.result())
            except RequestError:
                if is_own:
                    raise
                items.append(self._started(each, wanted)[0].result())  # another's error names another's field
        return items

    def _loaded(self, source: PictureSource, wanted: "Wanted") -> Loaded:
        if source.embeddings is not None:
            return self._loaded_embeds(source, source.embeddings)
        content: bytes | np.ndarray | None
        if source.url is not None:
            content = self._fetcher.fetch(source.url, source.field)
        elif source.path is not None:
            content = read_path(source.path, source.field, self.limits)
        elif source.image is not None:
            content = image_pixels(source.image, source.field, self.limits, wanted.background)
        else:
            content = source.data if source.data is not None else source.array
        assert content is not None, f"{source.field} has nothing in it"
        return Loaded(source, content, source_digest(content))

    def _loaded_embeds(self, source: PictureSource, given: Embeddings) -> Loaded:
        assert self.embeds is not None, "`check_number` refuses embeddings"
        layout = self.processor.layout_of_embeds(len(given.values), given.grid, source.field)
        data = in_form(given.values, self.embeds, source.field)
        digest = embeds_digest(data, given.grid, self.embeds)
        return Loaded(source, data, digest, replace(layout, pixels_shape=data.shape))

    def _started(self, loaded: Loaded, wanted: "Wanted") -> "tuple[Future[KeyedPicture], bool]":
        """A picture from the cache, from somebody who has it processed now, or from a process; whether it is that."""
        digest = item_digest(loaded.digest, wanted.chosen)
        with self._lock:
            if (under_way := self._under_way.get(digest)) is not None:
                return under_way, False
            if (item := self.cache.get(digest)) is not None:
                future: Future[KeyedPicture] = Future()
                future.set_result(item)
                return future, True
            future = self._workers.submit(self._process, loaded, wanted, digest)
            self._under_way[digest] = future
        future.add_done_callback(lambda _: self._under_way.pop(digest, None))
        return future, True

    def _process(self, loaded: Loaded, wanted: "Wanted", digest: bytes) -> KeyedPicture:
        field = loaded.source.field
        if loaded.layout is not None and self.embeds is not None:
            assert isinstance(loaded.content, np.ndarray), "of embeddings there is an array"
            options = {"embeds": self.embeds.dtype.name}
            key = picture_key(self._identity, "image", options, loaded.layout, loaded.digest)
            item = KeyedPicture(key, loaded.layout, loaded.content, is_embeds=True)
        else:
            item = self._processes.process(loaded.content, field, wanted.kwargs, background=wanted.background)
        self.budget.hold(item.pixels)
        self.cache.put(digest, item)
        return item


def size_of_path(path: str, field: str) -> tuple[int, tuple[int, int] | None]:
    """Bytes of a file, and width and height if its beginning says them. Raises RequestError that names `field`."""
    head = read_path(path, field, PictureLimits(max_bytes=HEAD_BYTES))
    header = read_header(head)
    return Path(path).expanduser().stat().st_size, None if header is None else (header.width, header.height)


def read_path(path: str, field: str, limits: PictureLimits) -> bytes:
    """The bytes of a file that the caller names. Raises RequestError that names `field`."""
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(limits.max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no path"
        raise RequestError(
            f"{field} is {shown(path)}, which cannot be read: {reason}. Check the path.", field
        ) from None


# ---- features ------------------------------------------------------------------------------------


def features_of(items: Sequence[KeyedPicture], places: Sequence[Placed]) -> tuple[MultiModalFeature, ...]:
    """What the engine core is told of the pictures of a prompt."""
    return tuple(
        MultiModalFeature(
            key=item.key,
            modality="image",
            offset=place.offset,
            length=place.length,
            runs=place.runs,
            grid=(item.layout.num_items, item.layout.rows, item.layout.columns),
            pixels=item.pixels,
            is_embeds=item.is_embeds,
        )
        for item, place in zip(items, places, strict=True)
    )
