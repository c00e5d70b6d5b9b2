"""`jaxpaged merge`: a model with a LoRA adapter in its weights, as a checkpoint of its own.

Works on files alone: no engine is started.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

from jaxpaged.entrypoints.argument_parser import Parser


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "merge",
        help="write a model with a LoRA adapter in its weights",
        usage="%(prog)s BASE ADAPTER -o FOLDER [options]",
        epilog="The folder is a model by itself, in the base's type, which other engines load too: "
        "jaxpaged generate --model FOLDER.",
    )
    parser.add_argument("base", metavar="BASE", help="the model: a folder in Hugging Face format, a hub id, or 'demo'")
    parser.add_argument("adapter", metavar="ADAPTER", help="the adapter: a folder that PEFT wrote, or a hub id")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="a new or empty folder to write to")
    parser.add_argument("--revision", help="branch, tag or commit of the model on the hub")
    parser.add_argument("--download-dir", metavar="FOLDER", help="where hub downloads are kept")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Read both, and write the sum. Returns the exit status."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # weights only pass through: no accelerator is needed
    from jaxpaged.entrypoints.terminal import ProgressLine
    from jaxpaged.models.config import architecture_of, load_hf_config
    from jaxpaged.models.pooling import pooling_model
    from jaxpaged.models.registry import model_for, task_of
    from jaxpaged.params.adapters.merging import write_merged
    from jaxpaged.params.hub import resolve_adapter_folder, resolve_model_folder
    from jaxpaged.params.mistral_folder import in_own_words

    folder = resolve_model_folder(args.base, args.revision, args.download_dir)
    adapter = resolve_adapter_folder(args.adapter, download_dir=args.download_dir)
    hf = load_hf_config(folder)
    model, task = model_for(hf), task_of(architecture_of(hf))
    with in_own_words(folder):
        config = model.config_from_hf(hf)
    model = model if task == "generate" else pooling_model(model, task)
    progress = ProgressLine()
    try:
        update = partial(progress.update, "weights")
        write_merged(model.param_specs(config, 1), config, folder, adapter, Path(args.output), update)
    finally:
        progress.close()
    return 0
