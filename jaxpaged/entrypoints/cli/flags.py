"""Flags made from declarations: engine options from `EngineConfig`, sampling parameters from `SamplingParams`.

A flag that was not given leaves no trace in the parsed arguments, so that a YAML file and the model's own defaults
can speak. Ranges are checked by the classes themselves; here text only becomes a value of the right type.
This module knows no command.
"""

import argparse
import itertools
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from jaxpaged.config import all_options
from jaxpaged.config.vllm_options import FOREIGN_OPTIONS, ForeignOption
from jaxpaged.entrypoints.cli.command_words import plain_words
from jaxpaged.entrypoints.cli.help_pages import WORD_FLAG, HelpAbout, page
from jaxpaged.entrypoints.cli.values import SUFFIXES, converter, essential_type, json_or_text, spelled
from jaxpaged.errors import UsageError, did_you_mean
from jaxpaged.sampling_params import SAMPLING_HELP, SamplingParams
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams

SHORT_FLAGS = {
    "model": ["-m"],
    "tensor_parallel_size": ["-tp"],
    "quantization": ["-q"],
    "n": ["-n"],
    "pipeline_parallel_size": ["-pp"],
    "data_parallel_size": ["-dp"],
    "decode_context_parallel_size": ["-dcp"],
    "prefill_context_parallel_size": ["-pcp"],
    "enable_expert_parallel": ["-ep"],
    "optimization_level": ["-O"],
    "data_parallel_rank": ["-dpn"],
    "data_parallel_start_rank": ["-dpr"],
    "data_parallel_size_local": ["-dpl"],
    "data_parallel_address": ["-dpa"],
    "data_parallel_rpc_port": ["-dpp"],
    "data_parallel_backend": ["-dpb"],
    "data_parallel_hybrid_lb": ["-dph"],
    "data_parallel_external_lb": ["-dpe"],
    "data_parallel_multi_port_external_lb": ["-dpm"],
    "speculative_config": ["-sc"],
    "compilation_config": ["-cc"],
    "attention_config": ["-ac"],
    "diffusion_config": ["-dc"],
    "api_server_count": ["-asc"],
    "node_rank": ["-r"],
}
# Options of the engine whose name may be a sampling parameter's, and the flag that they have in every command. They
# have their own name too where requests have no flags, as in vLLM's server.
FLAGS_OF_THEIR_OWN = {"seed": "engine_seed"}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with 2; names the nearest flag for an unknown one."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, formatter_class=Help, **settings)
        hidden = argparse.SUPPRESS
        self.add_argument(WORD_FLAG, action=HelpAbout, dest=hidden, default=hidden, help=hidden)

    def format_help(self) -> str:
        return page(self)

    def add_commands(self, **settings: Any) -> Any:
        """Room for subcommands, one of which must be given: alone, the command shows its help and exits with 2."""

        def show_help(args: argparse.Namespace) -> int:
            self.print_help(sys.stderr)
            return 2

        self.set_defaults(run=show_help, command_parser=self, debug=False)
        return self.add_subparsers(prog=self.prog, **settings)

    def error(self, message: str) -> NoReturn:
        sentence = message if message.endswith((".", "?")) else f"{message}."
        self.exit(2, f"{self.prog}: error: {sentence} See {self.prog} --help.\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        return super().parse_known_args(plain_words(sys.argv[1:] if args is None else args), namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = getattr(parsed, "command_parser", self)
            flag = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
            command.error(f"unknown argument {flag!r}.{did_you_mean(flag, command._option_string_actions)}")
        return parsed

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        what = "unknown command " if action.nargs == argparse.PARSER else ""
        near = did_you_mean(str(value), action.choices)
        listed = near or f" Choose from {', '.join(map(str, action.choices))}."
        raise argparse.ArgumentError(None if what else action, f"{what}{value!r}.{listed}")


class Help(argparse.RawDescriptionHelpFormatter):
    """Room for our longest flag names; examples keep their lines."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32)


# ---- declarations -> flags -------------------------------------------------------------------------


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """MODEL as an argument, which means what --model means; `engine_options` reads both."""
    parser.add_argument(
        "model_argument",
        nargs="?",
        metavar="MODEL",
        help="a folder in Hugging Face format, a hub id, or 'demo'; the same as --model",
    )


def add_engine_flags(
    parser: argparse._ActionsContainer,
    *,
    file_holds: str | None = "engine options",
    own_names: Mapping[str, str] = FLAGS_OF_THEIR_OWN,
) -> None:
    """A flag for every option of the engine, called by `own_names` if it is there, and --config, unless `file_holds`
    nothing."""
    if file_holds is not None:
        parser.add_argument("--config", metavar="FILE", help=f"YAML file of {file_holds}; flags override it")
    for section, options in itertools.groupby(all_options(), lambda pair: pair[0]):
        group = parser
        if isinstance(parser, argparse.ArgumentParser):  # groups have none of their own
            group = parser.add_argument_group(f"engine: {section}")
        for _, option in options:
            help = option.metadata["help"] + shown_default(option.default)
            choices, aliases = option.metadata.get("choices"), option.metadata.get("aliases", {})
            name = own_names.get(option.name, option.name)
            is_free = name != option.name and "--" + option.name not in parser._option_string_actions
            add_flag(
                group,
                name,
                option.type,
                help,
                choices and (*choices, *map(str, aliases)),
                aliases,
                synonyms=[option.name] if is_free else (),
            )
    add_foreign_flags(parser)


def add_foreign_flags(
    parser: argparse._ActionsContainer, options: Mapping[str, ForeignOption] = FOREIGN_OPTIONS
) -> None:
    """vLLM's flags for what is not there: unseen in the help, so that its command lines parse. Which values pass is
    decided with the other options. A flag that the command has already keeps its own meaning."""
    for name, foreign in options.items():
        flags = [*SHORT_FLAGS.get(name, []), "--" + name.replace("_", "-")]
        if flags[-1] in parser._option_string_actions:
            continue
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if isinstance(foreign.default, bool):
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **settings)
        elif foreign.many:
            parser.add_argument(*flags, type=json_or_text, nargs="+", action=Collected, **settings)
        else:
            parser.add_argument(*flags, type=json_or_text, **settings)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every sampling parameter that a caller may set."""
    group = parser.add_argument_group("sampling", "defaults are those of the model's generation_config.json")
    annotations = typing.get_type_hints(SamplingParams)
    for name, help in SAMPLING_HELP.items():
        add_flag(group, name, annotations[name], help, None)


class Collected(argparse.Action):
    """Values of a flag that takes some, or one that is a list already."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values if len(values) > 1 else values[0])


class Several(argparse.Action):
    """Values of a flag that takes some, each of which may be a list itself: `a b`, `a,b`, `["a", "b"]`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *(each for part in values for each in part)])


def add_flag(
    group: Any,
    name: str,
    annotation: Any,
    help: str,
    choices: tuple[str, ...] | None,
    aliases: Mapping[Any, Any] | None = None,
    *,
    several: bool = False,
    synonyms: Sequence[str] = (),
) -> None:
    """One option as a flag, with further names of it. With `several` a list may be given as words too, as vLLM's server
    takes it."""
    flags = [*SHORT_FLAGS.get(name, []), *("--" + each.replace("_", "-") for each in (name, *synonyms))]
    settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help.replace("%", "%%")}
    kind = essential_type(annotation)
    if kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **settings)
    elif kind == list[str]:
        # A stop text may contain commas: the flag is repeated instead.
        group.add_argument(*flags, action="append", metavar="TEXT", **settings)
    else:
        metavar = f"{{{','.join(choices)}}}" if choices else metavar_of(kind)
        convert = spelled(aliases or {}, converter(annotation))
        if several and typing.get_origin(kind) is tuple:
            settings |= {"nargs": "+", "action": Several}
        group.add_argument(*flags, type=convert, metavar=metavar, **settings)


def metavar_of(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin in (list, tuple):
        return "A,B,..."
    is_json = origin is dict or kind is StructuredOutputsParams
    return "JSON" if is_json else {int: "N", float: "X"}.get(kind, "TEXT")


def shown_default(default: Any) -> str:
    """The default of an option as its help ends: on where it is True; nothing where it is off, empty, or of no plain
    type."""
    if default is True:
        return " (default: on)"
    if isinstance(default, bool) or not isinstance(default, str | int | float) or default == "":
        return ""
    is_size = isinstance(default, int) and default >= 2**16 and default % 2**10 == 0
    return f" (default: {spelled_size(default) if is_size else default})"


def spelled_size(count: int) -> str:
    """`16M` of 16777216, as `values.whole_number` reads it."""
    letter = next(letter for letter in "GMK" if count % SUFFIXES[letter] == 0)
    return f"{count // SUFFIXES[letter]}{letter}"


# ---- flags -> options ------------------------------------------------------------------------------


def engine_options(
    args: argparse.Namespace, file: Mapping[str, Any] | None = None, besides: Collection[str] = ()
) -> dict[str, Any]:
    """What was given for the engine: the options of the YAML `file`, overridden by flags and by MODEL.

    None: --config is read here. The command has options `besides` of its own. Raises ConfigError, and UsageError for
    two models.
    """
    if file is None:
        from jaxpaged.entrypoints.cli.config_file import read_config_file

        file = read_config_file(args.config) if args.config else {}
    names = [*(option.name for _, option in all_options()), *FOREIGN_OPTIONS]
    places = {name: FLAGS_OF_THEIR_OWN.get(name, name) for name in names if name not in besides}
    given = {name: getattr(args, place) for name, place in places.items() if hasattr(args, place)}
    model = chosen_model(args)
    return {**file, **given, **({"model": model} if model is not None else {})}


def chosen_model(args: argparse.Namespace) -> str | None:
    """The MODEL of the command line, or that of --model. Raises UsageError when there are both."""
    argument, flag = getattr(args, "model_argument", None), getattr(args, "model", None)
    if argument is not None and flag is not None and argument != flag:
        raise UsageError(f"two models are given, {argument} and --model {flag}. Leave one out.")
    return argument if flag is None else flag


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given."""
    return {name: getattr(args, name) for name in SamplingParams.__struct_fields__ if hasattr(args, name)}
