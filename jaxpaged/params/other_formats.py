"""Folders and files that people have instead of a checkpoint, recognised by what lies there, and what to do.

Each function raises CheckpointError for what it recognises and is silent otherwise: the caller has the general words.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxpaged.config.lora import ADAPTER_CONFIG, adapter_config
from jaxpaged.errors import CheckpointError

LFS_FIRST_BYTES = b"version https://git-lfs.github.com/spec/"
LARGEST_POINTER = 1024
"""Bytes; the format allows no more."""
NEEDED_SUFFIXES = {".safetensors", ".json", ".model", ".tiktoken", ".jinja", ".txt"}
"""Of files that an engine reads. A picture or a PyTorch file may stay a pointer."""

SUPPORTED = "'jaxpaged models --supported' lists models and formats."
USE_SAFETENSORS = (
    "Name the folder or hub id of the model's safetensors version, usually the repository that it was made from."
)


def refuse_pointers(folder: Path) -> None:
    """For files that git left as Git-LFS pointers: their content was never downloaded."""
    pointers = sorted(path.name for path in folder.iterdir() if path.suffix in NEEDED_SUFFIXES and is_pointer(path))
    if pointers:
        more = f" and {len(pointers) - 1} more" if len(pointers) > 1 else ""
        raise CheckpointError(
            f"{folder / pointers[0]}{more}: this is a Git-LFS pointer and not the file itself. Run "
            f"'git lfs install && git lfs pull' in {folder}, or download the model with 'hf download'."
        )


def is_pointer(path: Path) -> bool:
    try:
        if path.stat().st_size > LARGEST_POINTER:
            return False
        with path.open("rb") as file:
            return file.read(len(LFS_FIRST_BYTES)) == LFS_FIRST_BYTES
    except OSError:
        return False


def refuse_other_folder(folder: Path) -> None:
    """For a folder without a model's description, or without weights, that holds something else."""
    if (folder / "model_index.json").exists():
        raise CheckpointError(
            f"{folder} holds a diffusers pipeline (model_index.json), which makes images or the like and not text. "
            "Name a language model."
        )
    if gguf := sorted(path.name for path in folder.glob("*.gguf")):
        raise CheckpointError(f"{folder / gguf[0]} is a model in GGUF format. Name the file, and not its folder.")
    refuse_adapter(folder)
    for pattern, what in OTHER_FILES.items():
        if found := sorted(path.name for path in folder.glob(pattern)):
            raise CheckpointError(
                f"{folder} holds a model for {what} ({found[0]}), which is not read. {USE_SAFETENSORS} {SUPPORTED}"
            )
    if inside := sorted(path.parent.name for path in folder.glob("*/config.json")):
        raise CheckpointError(
            f"{folder} holds no model itself, but {len(inside)} of its folders do: {', '.join(inside[:3])}. Name one "
            "of them."
        )


PARAMS = "params.json"
"""The description of a model in Mistral's own format, and in Meta's."""


def is_mistral_folder(folder: Path) -> bool:
    """Whether a folder has Mistral's own format, and no other (`mistral_folder.py`)."""
    is_described = (folder / PARAMS).exists() and not (folder / "config.json").exists()
    return is_described and not any(folder.glob("*.pth"))  # those are Meta's


OTHER_FILES = {
    PARAMS: "Meta's own tools",
    "*.onnx": "ONNX",
    "onnx/*.onnx": "ONNX",
    "openvino_model.xml": "OpenVINO",
    "*.engine": "TensorRT",
    "weights*.npz": "MLX",
    "*.mlpackage": "Core ML",
    "*.tflite": "LiteRT",
    "*.task": "MediaPipe",
}
"""Files of models in other formats -> whose they are."""


def refuse_adapter(folder: Path) -> None:
    """For a folder with an adapter and without the weights of a model, which it may describe nevertheless."""
    of_adapter, weights = set(folder.glob("adapter_model*")), set(folder.glob("*.safetensors"))
    is_described = (folder / "config.json").exists()
    if not (folder / ADAPTER_CONFIG).exists() or (is_described and (weights - of_adapter or not of_adapter)):
        return
    given = adapter_config(folder)
    kind = str(given.get("peft_type") or ("LORA" if given else "PEFT"))[:40]
    base = str(given.get("base_model_name_or_path") or "")[:200]
    kind = "LoRA" if kind == "LORA" else kind
    if kind == "LoRA":
        todo = (
            "Give that as the model, and this folder to --enable-lora --lora-modules; or write both as one: "
            f"jaxpaged merge {base or 'BASE'} ADAPTER -o FOLDER."
        )
    else:
        todo = "Only LoRA is read: merge it with peft (merge_and_unload, then save_pretrained), and serve what you get."
    raise CheckpointError(
        f"{folder} holds a {kind} adapter ({ADAPTER_CONFIG}) and not a whole model{base and f', which is {base}'}. "
        f"{todo} {SUPPORTED}"
    )


QUANTISED_ENDS = (".qweight", ".weight_packed", ".weight.absmax", ".weight_scale_2", ".biases", ".Wq_packed")
"""Ends of the names of tensors that only quantised weights have."""


def refuse_quantised_tensors(names: Iterable[str]) -> None:
    """For tensors of weights that were quantised, where no description has said so."""
    if found := next((name for name in names if name.endswith(QUANTISED_ENDS)), None):
        raise quantised(f"the checkpoint holds quantised weights ({found})", None)


def quantised(what: str, bits: int | None) -> CheckpointError:
    """The error for weights that were quantised in a way that is not read, to so many bits."""
    return CheckpointError(
        f"{what}. Checkpoints of this kind are not supported yet. Serve the 16-bit version of the model with "
        f"--quantization {'int8' if bits == 8 else 'int4'}, which rounds its weights when they are loaded. {SUPPORTED}"
    )


def refuse_part_of_pipeline(folder: Path, hf_config: Mapping[str, Any]) -> None:
    """For a part of a diffusers pipeline, whose config.json says so."""
    if "_diffusers_version" in hf_config:
        raise CheckpointError(
            f"{folder / 'config.json'} describes {hf_config.get('_class_name', 'a part')} of a diffusers pipeline, not "
            "a language model. Name a language model."
        )
