"""Runs one model that sees over one prompt with pictures, in any chunks, without an engine; see `paged.py`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.models.interface import Batch
from jaxpaged.models.registry import model_for
from jaxpaged.models.vision.interface import ALL, WINDOWS, batch_of
from jaxpaged.multimodal.processors import processor_of
from jaxpaged.params.checkpoint import load_params
from jaxpaged.worker.cache.kinds import kind_of
from jaxpaged.worker.step.packed import StepParts
from tests.models.paged import PagedModel, golden_of
from tests.models.seeing_checkpoints import IMAGE_TOKEN, SEEING, preprocessor_config_of, write_seeing_checkpoint

CHUNK = 64
TABLE = np.array([7, 2, 9, 4, 11, 1, 8, 3, 10, 5], np.int32)


@dataclasses.dataclass
class Feature:
    """What `Vision.rope_offsets` reads of a `MultiModalFeature`."""

    offset: int
    runs: list[tuple[int, int]]
    grid: tuple[int, int, int]
    moment: int = 0
    time: int = 0


def runs_of(prompt):
    """(start, length) of each run of placeholders."""
    is_image = np.pad(np.array(prompt) == IMAGE_TOKEN, 1)
    starts, ends = np.flatnonzero(is_image[1:] & ~is_image[:-1]), np.flatnonzero(is_image[:-1] & ~is_image[1:])
    return [(int(start), int(end - start)) for start, end in zip(starts, ends, strict=True)]


def features_in(prompt, grids):
    """The pictures of a prompt, each with as many runs as it needs."""
    runs, features = runs_of(prompt), []
    for grid in grids:
        own, missing = [], int(np.prod(grid))
        while missing:
            own.append(runs.pop(0))
            missing -= own[-1][1]
        features.append(Feature(own[0][0], own, grid))
    assert not runs
    return features


class SeeingModel(PagedModel):
    """A checkpoint that sees, on `num_shards` devices; `table_CV` is that of its processor."""

    def __init__(self, folder, table_CV, num_shards=1):
        super().__init__(folder, num_shards)
        self.vision = self.model.vision
        self.encode = jax.jit(
            lambda params, packed: self.vision.encode(params, self.config.vision, batch_of(packed, table_CV))
        )

    def embeds(self, pictures, size):
        packed = self.vision.pack(self.config.vision, pictures, size)
        return np.asarray(self.encode(self.params.vision, packed))

    def prompt_logits(self, prompt, pictures, size, chunks=None):
        """Logits [len(prompt), V], computed in chunks of these lengths, from the first token on."""
        features = features_in(prompt, [grid for _, grid in pictures])
        return self.logits_with(prompt, features, self.embeds(pictures, size), chunks)

    def logits_with(self, prompt, features, rows_EX, chunks=None):
        """The same of a prompt whose features have these embeddings, in their order."""
        is_visual = np.zeros(len(prompt), bool)
        for feature in features:
            for start, length in feature.runs:
                is_visual[start : start + length] = True
        visual = np.zeros((len(prompt), rows_EX.shape[1]), np.float32)
        visual[is_visual] = rows_EX[: is_visual.sum()]
        ends = np.zeros(len(prompt), np.int32)
        for start, length in runs_of(prompt) if self.config.vision.both_ways else ():
            ends[start : start + length] = start + length
        self.num_computed, logits = 0, []
        offsets, self.delta = np.zeros((3, len(prompt)), np.int32), 0
        if self.vision.rope_offsets is not None:
            offsets, self.delta = self.vision.rope_offsets(features, len(prompt))
        tokens = np.where(is_visual, 0, prompt)
        for length in chunks or [len(prompt)]:
            part = slice(self.num_computed, self.num_computed + length)
            logits.append(self._part(tokens[part], visual[part], is_visual[part], ends[part], offsets[:, part]))
        return np.concatenate(logits)[:, : self.config.vocab_size]

    @functools.cached_property
    def lowered(self):
        raise NotImplementedError("it has a program of its own")

    @functools.cached_property
    def step(self):
        return jax.jit(self._step, donate_argnames="kv")

    def _part(self, tokens, visual, is_visual, ends, offsets):
        count = len(tokens)
        padded = lambda x: np.pad(x, ((0, CHUNK - count), *[(0, 0)] * (x.ndim - 1)))
        data = [padded(x) for x in (tokens.astype(np.int32), visual, is_visual, ends, offsets.T.astype(np.int32))]
        logits_TV, self.kv = self.step(self.params, data, np.int32(count), np.int32(self.num_computed), kv=self.kv)
        self.num_computed += count
        return np.asarray(logits_TV)[:count]

    def _step(self, params, data, num_tokens, num_computed, kv):
        tokens_T, visual_TE, is_visual_T, ends_T, offsets_T3 = data
        positions_T = num_computed + jnp.arange(CHUNK, dtype=jnp.int32)
        starts = jnp.array([0, num_tokens, num_tokens])
        tables = jnp.stack([TABLE, np.zeros_like(TABLE)])
        seq_lens = jnp.array([num_computed + num_tokens, 0])
        parts = StepParts(jnp.array([1]), jnp.arange(2), starts, seq_lens, tokens_T, *[None] * 8)
        end_T, both_ways = jnp.maximum(ends_T, positions_T + 1), self.config.vision.both_ways
        ends = lambda spec: end_T if both_ways == ALL or (both_ways == WINDOWS and spec.window) else None
        settings = {"num_tokens": CHUNK, "decodes_only": False, "shared_6R": None}
        attention = [
            kind_of(spec).step_batch(self.context, spec, parts, tables, **settings, visible_end_T=ends(spec))
            for spec in self.groups
        ]
        caches = tuple((self.groups.index(spec), i) for i, spec in enumerate(self.specs))
        batch = Batch(tokens_T, positions_T, tuple(attention), caches, None, visual_TE, is_visual_T)
        if self.vision.rope_offsets is not None:
            batch = batch.replace(rope_offsets_3T=offsets_T3.T)
        output = self.model.forward(params, self.config, batch, kv)
        return self.model.compute_logits(self.model.head(params), self.config, output.hidden_TD), output.kv


class SeeingTower:
    """The tower of a checkpoint on `num_shards` devices."""

    def __init__(self, name, folder, num_shards=1, splits_items=False, dtype=jnp.float32):
        hf = SEEING[name]
        self.model, mesh = model_for(hf), make_mesh(num_shards)
        config = self.model.config_from_hf(hf)
        vision = dataclasses.replace(config.vision, splits_items=splits_items)
        self.config = dataclasses.replace(config, vision=vision)
        specs = self.model.param_specs(self.config, num_shards)
        self.params = load_params(specs, self.config, write_seeing_checkpoint(name, folder), mesh, dtype)
        self.table_CV = processor_of(hf, preprocessor_config_of(name)).table_CV
        self.mesh = mesh if splits_items else None
        self.encode = jax.jit(self._encode)

    def __call__(self, pictures, size):
        packed = self.model.vision.pack(self.config.vision, pictures, size)
        for name, (shape, dtype) in self.model.vision.shapes(self.config.vision, size).items():
            assert (packed[name].shape, packed[name].dtype.name) == (shape, dtype)
        return np.asarray(self.encode(self.params.vision, packed), np.float32)

    def _encode(self, params, packed):
        return self.model.vision.encode(params, self.config.vision, batch_of(packed, self.table_CV, self.mesh))


def golden_embeds(name):
    embeds = golden_of(name)["embeds"]
    return {part: np.concatenate([np.array(of_picture[part]) for of_picture in embeds]) for part in ("sums", "first")}
