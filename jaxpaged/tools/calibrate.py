"""`jaxpaged calibrate`: scales of keys and values for each layer and kv head, found by computing a text.

The file that it writes is what the option `kv_cache_scales` takes.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.flags import add_model_argument, engine_options
from jaxpaged.entrypoints.option_flags import add_engine_flags, whole_number

if TYPE_CHECKING:
    import numpy as np

    from jaxpaged.config import EngineConfig
    from jaxpaged.messages import Progress

EPILOG = """\
The text is computed once, with keys and values in the model's type. A scale is the largest number of a layer and head,
divided by the largest number of the type: what is larger later is cut off. Take text as the model will see it.

examples:
  jaxpaged calibrate MODEL --text prompts.txt -o scales.json
  jaxpaged serve MODEL --kv-cache-dtype fp8 --kv-cache-scales scales.json
  jaxpaged calibrate MODEL --text prompts.txt --kv-cache-dtype int8 -o scales.json
"""
MOST_TOKENS = 2048


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "calibrate",
        help="find scales for a KV cache in fp8 or int8",
        usage="%(prog)s [MODEL] --text FILE [-o FILE] [options]",
        epilog=EPILOG,
    )
    add_model_argument(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help="text like that which the model will see")
    parser.add_argument(
        "-o",
        "--output",
        default="kv_cache_scales.json",
        metavar="FILE",
        help="the file to write (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=whole_number, default=65536, metavar="N", help="tokens of the text that are computed"
    )
    parser.add_argument(
        "--per-layer", action="store_true", help="one scale for all heads of a layer, as other engines read it"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    add_engine_flags(parser)
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Compute the text, and write the file. Returns the exit status."""
    from jaxpaged.config import EngineConfig
    from jaxpaged.config.cache_types import CACHE_TYPES, OTHER_NAMES
    from jaxpaged.entrypoints.cli.prompts import read_text
    from jaxpaged.entrypoints.terminal import ProgressLine
    from jaxpaged.errors import UsageError
    from jaxpaged.params.kv_scales import scales_file

    options = engine_options(args)
    name = options.pop("kv_cache_dtype", "fp8")
    cache_type = CACHE_TYPES.get(OTHER_NAMES.get(name, name))
    if cache_type is None or cache_type.scales != "head":
        raise UsageError(f"--kv-cache-dtype is {name}, which has no scales to find. Give fp8, fp8_e5m2 or int8.")
    if args.max_tokens < 1:
        raise UsageError(f"--max-tokens is {args.max_tokens}; it must be at least 1.")
    text, output = read_text(args.text, "--text"), Path(args.output)
    if not text.strip():
        raise UsageError(f"--text {args.text} is empty. Name a file with text as the model will see it.")
    progress = ProgressLine()
    try:
        config = EngineConfig.from_options(**options, kv_cache_dtype="auto")
        largest, num_tokens = largest_of_text(config, text, args.max_tokens, progress.update)
    finally:
        progress.close()
    of_layers = {
        layer: (of_numbers(k, cache_type.largest, args.per_layer), of_numbers(v, cache_type.largest, args.per_layer))
        for layer, (k, v) in largest.items()
    }
    try:
        output.write_text(scales_file(config.model.model, cache_type.dtype, of_layers), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}. Choose another file.") from None
    print(
        f"{output}: scales of {len(of_layers)} layers for {cache_type.dtype}, from {num_tokens} tokens", file=sys.stderr
    )
    return 0


def largest_of_text(
    config: "EngineConfig", text: str, max_tokens: int, progress: "Progress"
) -> tuple[dict[int, tuple["np.ndarray", "np.ndarray"]], int]:
    """(Layer -> the largest keys and values by head; tokens that were computed). Raises UsageError for a model without
    any, and what starting an engine raises."""
    import dataclasses

    from jaxpaged.engine.build import find_tokenizer_folder, resolve_model
    from jaxpaged.engine.input.tokenizer import load_tokenizer
    from jaxpaged.errors import UsageError
    from jaxpaged.worker.calibration import Calibration
    from jaxpaged.worker.engine_spec import EngineSpec
    from jaxpaged.worker.weights import weights_of
    from jaxpaged.worker.worker import meshes_of

    folder, model, decoder, config = resolve_model(config)
    nothing = f"{config.model.model} caches no keys and values, so there are no scales to find."
    if decoder.sees_both_ways:
        raise UsageError(nothing)
    cache = dataclasses.replace(config.cache, kv_cache_dtype=config.model.dtype)
    config = dataclasses.replace(config, cache=cache)
    if config.parallel.pipeline_parallel_size > 1 or model.draft is not None or decoder.vision is not None:
        raise UsageError(
            "calibrate computes text, in one stage, and nothing drafts. Give --language-model-only for a model that "
            "sees, and leave out -pp and --speculative-config."
        )
    most = min(MOST_TOKENS, config.max_model_len)
    tokens = load_tokenizer(find_tokenizer_folder(config, folder)).encode(text)[:max_tokens]
    (mesh,) = meshes_of(config.parallel)
    spec = EngineSpec(config, model, decoder, mesh)
    params = weights_of([spec], folder, progress).bring_back()
    calibration = Calibration(spec, params, most)
    if not calibration.layers:
        raise UsageError(nothing)
    return calibration.largest(tokens[i : i + most] for i in range(0, len(tokens), most)), len(tokens)


def of_numbers(largest_K: "np.ndarray", of_type: float, per_layer: bool) -> "np.ndarray":
    """The scales of a layer, in float32; 1 for heads whose numbers are all zero."""
    import numpy as np

    from jaxpaged.errors import UsageError

    if not np.isfinite(largest_K).all():
        raise UsageError("the model makes keys or values of the text that are no numbers. Take other text.")
    largest = largest_K.max() if per_layer else largest_K
    return np.where(largest > 0, largest / of_type, 1.0).astype(np.float32)
