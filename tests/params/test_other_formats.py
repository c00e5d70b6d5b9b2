"""What people have instead of a checkpoint is recognised wherever it is met first, and the error says what to do."""

import json
import shutil

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import resolve_model
from jaxpaged.entrypoints.cli import FAILURE, main
from jaxpaged.errors import CheckpointError
from jaxpaged.params.checkpoint import entries_of_folder
from jaxpaged.params.hub import EMBEDDED_FOLDER
from jaxpaged.params.other_formats import refuse_pointers
from jaxpaged.tools.planning.plan_engine import plan_engine

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 9\n"


def copy_of_demo(folder, without=()):
    shutil.copytree(EMBEDDED_FOLDER, folder, ignore=shutil.ignore_patterns(*without))
    return folder


def gguf(folder):
    folder.mkdir()
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF\x03\0\0\0")


def gguf_beside_a_description(folder):
    (copy_of_demo(folder, ["*.safetensors*"]) / "model-Q4_K_M.gguf").write_bytes(b"GGUF\x03\0\0\0")


def diffusers(folder):
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))


def part_of_diffusers(folder):
    folder.mkdir()
    config = {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30.0"}
    (folder / "config.json").write_text(json.dumps(config))


def pointer(name):
    def write(folder):
        (copy_of_demo(folder) / name).write_text(POINTER)

    return write


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (gguf, "is too short for a GGUF file"),
        (gguf_beside_a_description, "GGUF format. Name the file, and not its folder"),
        (diffusers, "holds a diffusers pipeline .* Name a language model"),
        (part_of_diffusers, "UNet2DConditionModel of a diffusers pipeline"),
        (pointer("model.safetensors"), "model.safetensors: this is a Git-LFS pointer .* git lfs pull"),
        (pointer("tokenizer.json"), "tokenizer.json: this is a Git-LFS pointer .* git lfs pull"),
        (pointer("config.json"), "config.json: this is a Git-LFS pointer .* git lfs pull"),
    ],
)
def test_a_folder_that_holds_something_else_is_refused_with_what_to_do(tmp_path, write, words):
    folder = tmp_path / "model"
    write(folder)
    config = EngineConfig.from_options(model=str(folder))
    with pytest.raises(CheckpointError, match=words):
        entries_of_folder(resolve_model(config)[0])
    if write is not gguf_beside_a_description:  # of which a description is all that a plan reads
        with pytest.raises(CheckpointError, match=words):
            plan_engine(config, "h100", compile=False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model-Q4_K_M.gguf", "there is no file model-Q4_K_M.gguf"),
        ("somebody/Model-7B-GGUF:Q4_K_M", "somebody/Model-7B-GGUF is not in the local cache"),
    ],
)
def test_the_name_of_a_gguf_model_is_recognised(capsys, name, words):
    assert main(["generate", "hello", "--model", name]) == FAILURE
    assert words in capsys.readouterr().err


def test_pointers_that_nobody_reads_may_stay(tmp_path):
    for name in ("picture.png", "pytorch_model.bin"):
        (tmp_path / name).write_text(POINTER)
    refuse_pointers(tmp_path)
    (tmp_path / "a.json").write_text(POINTER + " " * 1024)
    refuse_pointers(tmp_path)
    (tmp_path / "b.json").mkdir()
    refuse_pointers(tmp_path)
