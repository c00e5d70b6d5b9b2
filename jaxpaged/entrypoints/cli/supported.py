"""`jaxpaged models --supported`: every architecture that is known, the models that have it, and formats of weights."""

import json
from typing import Any

from jaxpaged.models.known import FORMATS, KNOWN, LANGUAGE_MODEL_ONLY, PICTURES, Known

GENERATES, CLASSIFIES = "ForCausalLM", "ForSequenceClassification"
MARK = "text *"
NOTES = (
    (MARK, LANGUAGE_MODEL_ONLY),
    ("weights", f"safetensors in 16 or 32 bits, or quantised: {', '.join(FORMATS)}; of GPT-OSS mxfp4, too"),
    ("GGUF", "general.architecture of files *.gguf that are read"),
    ("pooling", "NAMEModel embeds and NAMEForSequenceClassification classifies for each NAMEForCausalLM;"),
    ("", "with --runner pooling every one embeds; NAMEForMaskedLM is taken as the NAMEModel of an encoder"),
    ("checked", "tests compare logits with those of transformers, on tiny random checkpoints (tests/golden)"),
)
"""What holds for all."""


def print_supported(as_json: bool) -> None:
    """A table for people, or a JSON object a line for programs."""
    if as_json:
        for known in KNOWN:
            print(json.dumps(facts(known)))
        return
    table = [("architecture", "reads", "GGUF", "models")]
    table += [row(known) for known in KNOWN]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
    print()
    for name, note in NOTES:
        print(f"{name:<7}  {note}")


def row(known: Known) -> tuple[str, ...]:
    reads = MARK if known.reads == LANGUAGE_MODEL_ONLY else known.reads
    return known.architecture, reads, known.gguf or "-", ", ".join(known.models)


def serves(known: Known) -> list[str]:
    """What an architecture, or its form for pooling, can be used for."""
    if known.pools_only:
        return ["classify" if known.architecture.endswith(CLASSIFIES) else "embed"]
    return ["generate", "embed", *(["classify"] if known.architecture.endswith(GENERATES) else [])]


def facts(known: Known) -> dict[str, Any]:
    """What a program may ask of an architecture."""
    return {
        "architecture": known.architecture,
        "models": known.models,
        "reads": ["text", "pictures"] if known.reads == PICTURES else ["text"],
        "language_model_only": known.reads == LANGUAGE_MODEL_ONLY,
        "serves": serves(known),
        "weights": ["safetensors", *known.formats, *(["gguf"] if known.gguf else [])],
        "gguf_architecture": known.gguf,
    }
