"""Tensors that lie in a checkpoint's files and that no parameter is made of: each has a reason, or is an error.

What is there twice must be equal, bit by bit, whichever is read. A tensor that something else stands for must say the
same as that. And a part of a model that is not computed may stay where it is. Knows names and files, and no models.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.safetensors_reader import ALL_DTYPES, DTYPES, TensorEntry, mapped

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 4096
"""Of two tensors that are compared."""
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
IMAGES = re.compile(r"(model\.)?(vision_\w+|multi_modal_projector|visual|mm_projector|embed_vision)\..*")
"""What makes embeddings of images, in a model that also reads them."""
SOUNDS = re.compile(r"(model\.)?(audio_tower|embed_audio)\..*")
"""The same of sounds."""
POOLED = re.compile(r"vision_tower\.head\..*")
"""What makes one vector of a picture, which language models do not read."""
FURTHER = re.compile(r"model\.mtp(_(layers|block|emb_norm|hidden_norm|linear_proj))?\..*")
"""Layers that predict further tokens, where they do not stand behind the others: read for drafts only."""
FREQUENCIES = re.compile(r"model\.(layers\.(?P<layer>\d+)\.self_attn\.)?rotary_emb\.inv_freq")
"""What positions are multiplied with, as old checkpoints keep it: it follows from `rope_theta`."""
CONSTANT = re.compile(r"model\.layers\.\d+\.mlp\.act_fn\.(?P<name>beta|eps)")
CONSTANTS = {"beta": 0.5, "eps": -1e-6}
"""What xIELU has besides what it learned (`layers/mlp.py`), kept in every layer."""
UNSCALED = ("default", "linear", "dynamic")
"""Kinds of rope whose frequencies were kept before they were stretched."""


def same_values(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors hold the same bytes; of two types, the same numbers."""
    if one.shape != other.shape:
        return False
    with mapped(one, ALL_DTYPES) as a, mapped(other, ALL_DTYPES) as b:
        if a.dtype == b.dtype:
            a, b = (np.atleast_1d(x).view(np.uint8) for x in (a, b))
        a, b = np.atleast_1d(a), np.atleast_1d(b)
        parts = (slice(i, i + ROWS_AT_ONCE) for i in range(0, len(a), ROWS_AT_ONCE))
        return all(np.array_equal(a[part], b[part]) for part in parts)


def check_copies(used: TensorEntry, copies: Iterable[TensorEntry]) -> None:
    """CheckpointError for a second tensor of the same meaning that has other values than the one that is read."""
    for copy in copies:
        if not same_values(used, copy):
            raise CheckpointError(
                f"{used.path} holds {used.name} and {copy.path} holds {copy.name}, which mean the same weight and have "
                "other values. Which of them the model is made of cannot be known: download the model again, or take "
                "the wrong one out."
            )


def check_unused(names: Iterable[str], entries: Mapping[str, TensorEntry], config: Any) -> list[str]:
    """Those of the unread tensors `names` that are no part of the model that `config` describes. Raises CheckpointError
    for one that something else stands for and that says otherwise."""
    foreign, of_images, of_sounds = list[str](), 0, 0
    for name in names:
        if SOUNDS.fullmatch(name) and config.architecture.endswith("ForConditionalGeneration"):
            of_sounds += 1
        elif IMAGES.fullmatch(name) and config.architecture.endswith("ForConditionalGeneration"):
            if config.vision is None:
                of_images += 1
            elif not POOLED.fullmatch(name):
                foreign.append(name)
        elif name == HEAD and config.tie_embeddings:
            check_tied_head(entries)
        elif (found := FREQUENCIES.fullmatch(name)) and int(found["layer"] or 0) < len(config.layers):
            check_frequencies(entries[name], config.layers[int(found["layer"] or 0)].rope)
        elif found := CONSTANT.fullmatch(name):
            check_constant(entries[name], CONSTANTS[found["name"]])
        elif not is_left_out(name, config):
            foreign.append(name)
    if of_images:
        logger.warning(
            "%d tensors that read images are left out: of this model only the text part is served", of_images
        )
    if of_sounds:
        logger.warning("%d tensors that read sounds are left out: no model is served with them", of_sounds)
    return foreign


def is_left_out(name: str, config: Any) -> bool:
    """Whether a tensor is of a part of the model that is not asked for: what a pooling engine has no use of, layers and
    tables for drafts."""
    if FURTHER.fullmatch(name):
        return config.num_mtp_layers > 0
    if name in ("d2t", "t2d"):  # `models/eagle3.py` looks whether they agree
        return hasattr(config, "draft_vocab_size")
    return config.leaves_out(name) or name == HEAD or (name == "score.weight" and config.num_labels > 0)


def check_tied_head(entries: Mapping[str, TensorEntry]) -> None:
    """CheckpointError where the output head of a model whose head is said to be its embeddings is another one."""
    head, embeddings = entries[HEAD], entries.get(EMBEDDINGS)
    if embeddings is not None and not same_values(head, embeddings):
        raise CheckpointError(
            f"{head.path} holds {head.name}, which differs from {embeddings.name}, but config.json says that they are "
            "one (tie_word_embeddings is true, or not there). If the head was trained by itself, write "
            '"tie_word_embeddings": false into config.json; else take it out.'
        )


def check_constant(entry: TensorEntry, expected: float) -> None:
    """CheckpointError where a kept constant of an activation has another value than the one that is computed with."""
    with mapped(entry, DTYPES) as kept:
        agrees = kept.size == 1 and np.allclose(kept.astype(np.float64), expected, rtol=0.01, atol=0)
    if not agrees:
        raise CheckpointError(
            f"{entry.path}: {entry.name} is not {expected:g}, the only value that is supported. Check that config.json "
            "belongs to these weights."
        )


def check_frequencies(entry: TensorEntry, rope: Any) -> None:
    """CheckpointError where a kept table of frequencies is not the one of config.json."""
    if rope is None or rope.rope_type not in UNSCALED:
        return
    expected = float(rope.theta) ** -(np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    with mapped(entry, DTYPES) as kept:
        agrees = kept.shape == expected.shape and np.allclose(kept.astype(np.float64), expected, rtol=0.01, atol=1e-6)
    if not agrees:
        raise CheckpointError(
            f"{entry.path}: {entry.name} are not the frequencies of rope_theta {rope.theta:g} in config.json. Check "
            "that config.json belongs to these weights, or write the right rope_theta into it."
        )
