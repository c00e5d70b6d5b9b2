"""Pictures of prompts, from what callers give to what the engine core takes: found, checked, processed, cached, placed.

Blocking calls, for threads: they wait for room in the budget of bytes, for remote servers, and for the processes that
decode. An event loop gives them to `threads`. This module knows neither samplers nor schedulers.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.config.multimodal import GIB, MultiModalConfig, background_of
from jaxpaged.config.video_options import VideoOptions, video_options_of
from jaxpaged.engine.input.picture_parts import PictureOptions
from jaxpaged.engine.input.placeholders import NAMES, Placed, Placeholders
from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.errors import ConfigError, RequestError, shown
from jaxpaged.messages import MultiModalFeature
from jaxpaged.multimodal.budget import ByteBudget
from jaxpaged.multimodal.decoding import PictureLimits, picture_size
from jaxpaged.multimodal.embeddings import Embeddings, Form, embeds_digest, in_form, read
from jaxpaged.multimodal.fetching import FetchLimits, MediaFetcher
from jaxpaged.multimodal.headers import read_header
from jaxpaged.multimodal.identity import options_on, picture_key, source_digest
from jaxpaged.multimodal.pictures import array_size, base64_bytes, data_url_bytes, image_pixels
from jaxpaged.multimodal.processes import KeyedPicture, PictureProcesses
from jaxpaged.multimodal.processor_cache import ProcessorCache, item_digest
from jaxpaged.multimodal.processors import processor_of, with_engine_options
from jaxpaged.multimodal.processors.base import PictureLayout, Processor
from jaxpaged.multimodal.processors.videos import Size, VideoLayout
from jaxpaged.multimodal.sources import PictureSource
from jaxpaged.multimodal.thumbnails import thumbnail
from jaxpaged.multimodal.videos import Clip, clip_of

HEAD_BYTES = 1 << 18
SMALL_FRAME_BYTES = 1 << 20
"""Of a frame that grew to the fewest pixels that a model takes."""
THREADS_PER_PROCESS = 8
"""Threads that wait: for bytes in flight, for remote servers, for a process that decodes."""


@dataclass(frozen=True)
class Loaded:
    """A picture, or a moment of a video, whose bytes are here, and their digest. `moment`: rows and columns of its
    tokens. Of embeddings the content is what the engine takes, of that `layout`."""

    field: str
    content: bytes | np.ndarray | tuple[bytes | np.ndarray, ...]
    digest: bytes
    moment: tuple[int, int] | None = None
    layout: PictureLayout | None = None


@dataclass(frozen=True)
class LoadedSource:
    """What is there of a picture, or of a video: its moments, and what they become."""

    source: PictureSource
    pieces: Sequence[Loaded]
    layout: VideoLayout | None = None

    @property
    def digest(self) -> bytes:
        """What a client's name for it stands for."""
        if self.layout is None:
            return self.pieces[0].digest
        return hashlib.sha256(repr(self.layout).encode() + b"".join(each.digest for each in self.pieces)).digest()


@dataclass(frozen=True)
class Shown:
    """What one mark of a prompt stands for: a processed picture, or the moments of a video."""

    items: Sequence[KeyedPicture]
    layout: PictureLayout | VideoLayout

    @property
    def modality(self) -> str:
        return "video" if isinstance(self.layout, VideoLayout) else "image"


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
    processor: Processor
    chosen: Mapping[str, Any]
    background: tuple[int, int, int]
    videos: VideoOptions
    salt: str | None


class PictureIntake:
    """The pictures of one model. `local_files`: callers are of this process, and may name files by their paths.
    `embeds`: the form of embeddings in place of pictures; None: they are not taken.
    `kept_elsewhere`: bytes of processed pictures that engine cores in other processes keep.

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
        kept_elsewhere: int = 0,
    ):
        self.config = config
        self.local_files = local_files
        self.embeds = embeds
        self._identity = identity
        self._model = str((hf_config.get("architectures") or [hf_config.get("model_type")])[0])
        self.limits = PictureLimits()
        self._base: Processor = processor_of(hf_config, preprocessor_config)
        self.processor = with_engine_options(self._base, config.mm_processor_kwargs)
        self.placeholders = Placeholders(tokenizer, self.processor)
        self.cache = ProcessorCache(int(config.mm_processor_cache_gb * GIB))
        self.budget = ByteBudget(int(config.mm_bytes_in_flight_gb * GIB) - kept_elsewhere, self.cache.evict)
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
        """Raise RequestError for pictures or videos that are not taken, or too many of them, and for embeddings in
        place of pictures unless they are."""
        for source in sources:
            if source.embeddings is not None and self.embeds is None:
                raise RequestError(
                    f"{source.field} has floating point numbers, which are embeddings in place of a picture, and the "
                    "engine was started without enable_mm_embeds. Give the picture, an array as uint8.",
                    source.field,
                )
            if self.config.language_model_only and source.embeddings is None and source.is_given:
                raise RequestError(
                    f"{source.field} is a {NAMES[source.modality]}, but the engine was started with "
                    "language_model_only. Give its embeddings.",
                    source.field,
                )
        for modality, most in (("image", self.config.max_pictures), ("video", self.config.max_videos)):
            own = [source for source in sources if source.modality == modality]
            name = NAMES[modality]
            if own and not most:
                what = f"a {name}, but limit_mm_per_prompt is 0 for {modality}s"
                raise RequestError(f"{own[0].field} is {what}. Leave it out.", own[0].field)
            if len(own) > most:
                raise RequestError(
                    f"the prompt has {len(own)} {name}s, and may have {most} (limit_mm_per_prompt). Send fewer.",
                    own[most].field,
                )

    def check_videos(self, field: str | None) -> None:
        """Raise RequestError for a video of this field, if there is one, unless the model takes videos."""
        if field is not None and self.processor.videos is None:
            raise RequestError(
                f"{field} is a video, and {self._model} takes pictures only. Give some of its frames as pictures, one "
                "after the other.",
                field,
            )

    @property
    def written_marks(self) -> Mapping[str, str]:
        """What a chat template that knows only texts is given in their places, by modality."""
        marks = {"image": self.processor.written_mark}
        return marks if self.processor.videos is None else {**marks, "video": self.processor.videos.written_mark}

    def shown(self, sources: Sequence[PictureSource], options: PictureOptions) -> list[Shown]:
        """The processed pictures and videos, in order. Raises RequestError that names the field at fault, or
        FetchError."""
        self.check_number(sources)
        wanted = self._wanted(options)
        found = [self._named(source, wanted) for source in sources]
        missing = [self._opened(source, wanted) for source, item in zip(sources, found, strict=True) if item is None]
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
            videos = video_options_of({**self.config.media_io_kwargs, **(options.io_kwargs or {})})
        except ConfigError as error:
            raise RequestError(str(error), "media_io_kwargs") from None
        return Wanted(kwargs, processor, options_on(processor.options, background), background, videos, options.salt)

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

    def _named(self, source: PictureSource, wanted: "Wanted") -> Shown | None:
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
        return Shown([item], item.layout)

    def _opened(self, source: PictureSource, wanted: "Wanted") -> PictureSource:
        """A data URL as the bytes that it holds: they take less than it; embeddings as an array. Of a video the frames
        that are shown. Raises RequestError."""
        if source.embeddings is not None:
            return replace(source, embeddings=self._read_embeds(source.embeddings, source.field))
        if source.video is not None:
            clip = clip_of(source.video, wanted.videos, source.field)
            return replace(source, clip=replace(clip, frames=tuple(self._opened(each, wanted) for each in clip.frames)))
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
        """Bytes that a picture or a video takes at most while it is read, decoded and processed. Raises
        RequestError."""
        if source.embeddings is not None:
            assert self.embeds is not None, "`check_number` refuses embeddings"
            num_embeds, numbers = source.embeddings.values.shape
            return source.embeddings.values.nbytes + num_embeds * numbers * self.embeds.dtype.itemsize
        if source.clip is None:
            num_bytes, num_pixels = self._sizes(source)
            return num_bytes + 3 * num_pixels + self._processed_bytes
        sizes = [self._sizes(each) for each in source.clip.frames]
        self.limits.check_bytes(sum(len(each.data) for each in source.clip.frames if each.data), source.field)
        processed = [min(self._processed_bytes, 6 * num_pixels + SMALL_FRAME_BYTES) for _, num_pixels in sizes]
        return sum(num_bytes + 3 * num_pixels for num_bytes, num_pixels in sizes) + sum(processed)

    def _sizes(self, source: PictureSource) -> tuple[int, int]:
        """Bytes that are read, and pixels, at most. Raises RequestError."""
        num_bytes, size = self.limits.max_bytes, None
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
        return num_bytes, num_pixels

    def _made(self, sources: Sequence[PictureSource], wanted: "Wanted") -> list[Shown]:
        """Pictures and videos that have to be read, of which several may be under way at a time."""
        loaded = [self._loaded(source, wanted) for source in sources]
        for each in loaded:
            if each.source.uuid is not None:
                self.cache.bind(each.source.uuid, wanted.salt, each.digest, each.source.field)
        pieces = [piece for each in loaded for piece in each.pieces]
        started = [self._started(piece, wanted) for piece in pieces]
        items = []
        for piece, (future, is_own) in zip(pieces, started, strict=True):
            try:
                items.append(future.result())
            except RequestError:
                if is_own:
                    raise
                items.append(self._started(piece, wanted)[0].result())  # another's error names another's field
        left = iter(items)
        made = ([next(left) for _ in each.pieces] for each in loaded)
        return [Shown(own, each.layout or own[0].layout) for each, own in zip(loaded, made, strict=True)]

    def _loaded(self, source: PictureSource, wanted: "Wanted") -> LoadedSource:
        if source.clip is not None:
            return self._loaded_video(source, source.clip, wanted)
        if source.embeddings is not None:
            return LoadedSource(source, [self._loaded_embeds(source, source.embeddings)])
        content = self._content(source, wanted)
        return LoadedSource(source, [Loaded(source.field, content, source_digest(content))])

    def _loaded_video(self, source: PictureSource, clip: Clip[PictureSource], wanted: "Wanted") -> LoadedSource:
        """The moments of a video, each with its frames. Raises RequestError unless all frames have one size."""
        contents = [self._content(each, wanted) for each in clip.frames]
        sizes = [self._size(content, each.field) for content, each in zip(contents, clip.frames, strict=True)]
        for each, size in zip(clip.frames, sizes, strict=True):
            if size != sizes[0]:
                raise RequestError(
                    f"{each.field} is a frame of {size[0]}x{size[1]} pixels, and the first one of its video has "
                    f"{sizes[0][0]}x{sizes[0][1]}. Give frames of one size.",
                    each.field,
                )
        videos = wanted.processor.videos
        layout = videos.layout(Size(*sizes[0]), clip.seconds, clip.fps, source.field)
        grid, pieces = (layout.rows, layout.columns), []
        for first in range(0, len(contents), videos.frames):
            own = tuple(contents[first : first + videos.frames])
            pieces.append(Loaded(clip.frames[first].field, own, source_digest(own), grid))
        return LoadedSource(source, pieces, layout)

    def _size(self, content: bytes | np.ndarray, field: str) -> tuple[int, int]:
        """Width and height, of what is not decoded yet."""
        if isinstance(content, np.ndarray):
            return array_size(content, field, self.limits)
        return picture_size(content, field, self.limits)

    def _content(self, source: PictureSource, wanted: "Wanted") -> bytes | np.ndarray:
        """A file's bytes, or an array."""
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
        return content

    def _loaded_embeds(self, source: PictureSource, given: Embeddings) -> Loaded:
        assert self.embeds is not None, "`check_number` refuses embeddings"
        layout = self.processor.layout_of_embeds(len(given.values), given.grid, source.field)
        data = in_form(given.values, self.embeds, source.field)
        digest = embeds_digest(data, given.grid, self.embeds)
        return Loaded(source.field, data, digest, layout=replace(layout, pixels_shape=data.shape))

    def _started(self, loaded: Loaded, wanted: "Wanted") -> "tuple[Future[KeyedPicture], bool]":
        """A picture from the cache, from somebody who has it processed now, or from a process; whether it is that."""
        digest = item_digest(loaded.digest, self._chosen(loaded, wanted))
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

    def _chosen(self, loaded: Loaded, wanted: "Wanted") -> Mapping[str, Any]:
        """All that decides the pixels."""
        if loaded.moment is None:
            return wanted.chosen
        return {**options_on(wanted.processor.videos.options, wanted.background), "moment": list(loaded.moment)}

    def _process(self, loaded: Loaded, wanted: "Wanted", digest: bytes) -> KeyedPicture:
        if loaded.layout is not None and self.embeds is not None:
            assert isinstance(loaded.content, np.ndarray), "of embeddings there is an array"
            options = {"embeds": self.embeds.dtype.name}
            key = picture_key(self._identity, "image", options, loaded.layout, loaded.digest)
            item = KeyedPicture(key, loaded.layout, loaded.content, is_embeds=True)
        else:
            item = self._processes.process(
                loaded.content, loaded.field, wanted.kwargs, background=wanted.background, moment=loaded.moment
            )
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


def fillings_of(shown: Sequence[Shown]) -> dict[str, list[PictureLayout | VideoLayout]]:
    """What stands in place of marks, by modality."""
    fillings: dict[str, list[PictureLayout | VideoLayout]] = {}
    for each in shown:
        fillings.setdefault(each.modality, []).append(each.layout)
    return fillings


def features_of(
    shown: Sequence[Shown], places: Mapping[str, Sequence[Sequence[Placed]]]
) -> tuple[MultiModalFeature, ...]:
    """What the engine core is told of the pictures and videos of a prompt, in its order."""
    left = {modality: iter(own) for modality, own in places.items()}
    features = []
    for each in shown:
        of_video = each.layout.places if isinstance(each.layout, VideoLayout) else [(0, 0)]
        for item, place, (moment, time) in zip(each.items, next(left[each.modality]), of_video, strict=True):
            feature = MultiModalFeature(
                key=item.key,
                modality=each.modality,
                offset=place.offset,
                length=place.length,
                runs=place.runs,
                grid=(item.layout.num_items, item.layout.rows, item.layout.columns),
                pixels=item.pixels,
                is_embeds=item.is_embeds,
                moment=moment,
                time=time,
            )
            features.append(feature)
    return tuple(sorted(features, key=lambda feature: feature.offset))
