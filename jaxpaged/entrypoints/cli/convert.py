"""`jaxpaged convert`: a model's weights in our own layout, as an orbax checkpoint that loads without any renaming; or
rounded to few bits, as safetensors that other engines load too.

Works on files alone: no engine is started.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

from jaxpaged.config import EMBEDDED_MODEL
from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.flags import add_model_argument, chosen_model
from jaxpaged.entrypoints.option_flags import add_flag
from jaxpaged.errors import UsageError

PLUGIN_HELP = "plugins with models of one's own, each a Python file or 'module:NAME'"
SCHEMES = ("FP8_DYNAMIC", "W8A8", "W4A16")
"""Keys of `rounded_folder.ROUNDINGS`, which is imported when it is asked for."""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "convert",
        help="write a model as an orbax checkpoint, or rounded to 8 or 4 bits",
        usage="%(prog)s [MODEL] -o FOLDER [options]",
        epilog="The folder is a model by itself: jaxpaged generate --model FOLDER.",
    )
    add_model_argument(parser)
    parser.add_argument(
        "-m", "--model", default=argparse.SUPPRESS, metavar="TEXT", help=f"the same (default: {EMBEDDED_MODEL})"
    )
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="a new or empty folder to write to")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="type of the written weights (default: the model's)",
    )
    parser.add_argument(
        "--scheme",
        choices=SCHEMES,
        help="round weights to nearest and write safetensors in compressed-tensors' format, which other engines load "
        "too: float8 or int8 with a scale for each output, or 4 bits in groups of 128 inputs",
    )
    add_flag(parser, "plugin", tuple[str, ...], PLUGIN_HELP, None, several=True)
    parser.add_argument("--revision", help="branch, tag or commit of the model on the hub")
    parser.add_argument("--download-dir", metavar="FOLDER", help="where hub downloads are kept")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Read the model on the host and write it again. Returns the exit status."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # weights only pass through: no accelerator is needed
    from jaxpaged.distributed.mesh import make_mesh
    from jaxpaged.entrypoints.terminal import ProgressLine
    from jaxpaged.models.config import load_hf_config
    from jaxpaged.models.registry import MODELS, model_for
    from jaxpaged.params.checkpoint import load_params
    from jaxpaged.params.hub import resolve_model_folder
    from jaxpaged.params.mistral_folder import in_own_words
    from jaxpaged.params.orbax_format import make_folder, save_orbax
    from jaxpaged.params.rounded_folder import write_rounded
    from jaxpaged.plugins.loading import load_plugins

    if args.scheme and args.dtype != "auto":
        raise UsageError("--dtype is of orbax checkpoints; what --scheme leaves in 16 bits keeps its type.")
    folder = resolve_model_folder(chosen_model(args) or EMBEDDED_MODEL, args.revision, args.download_dir)
    hf = load_hf_config(folder)
    model = model_for(hf, models=load_plugins(getattr(args, "plugin", ()), None).joined("models", MODELS))
    with in_own_words(folder):
        config = model.config_from_hf(hf)
    specs, output = model.param_specs(config, 1), Path(args.output)
    progress = ProgressLine()
    update = partial(progress.update, "weights")
    try:
        if args.scheme:
            write_rounded(specs, config, folder, output, args.scheme, update)
        else:
            make_folder(output)  # found before the weights are read, which may take minutes
            dtype = config.dtype if args.dtype == "auto" else args.dtype
            save_orbax(specs, config, load_params(specs, config, folder, make_mesh(1), dtype, update), folder, output)
    finally:
        progress.close()
    return 0
