"""`EngineArgs`: all engine options as one flat object, as scripts for vLLM make and pass it around.

    args = EngineArgs(model="demo", max_num_seqs=4)
    engine = LLMEngine.from_engine_args(args)
    llm = LLM(**dataclasses.asdict(args))

It also holds those options of vLLM that are not here, at their defaults. This module knows no option by name.
"""

import argparse
import dataclasses
from typing import Any, Self

from jaxpaged.config import EMBEDDED_MODEL, EngineConfig, all_options
from jaxpaged.config.vllm_options import FOREIGN_OPTIONS
from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.option_flags import add_engine_flags
from jaxpaged.errors import ConfigError, did_you_mean


def flat_fields() -> list[tuple[str, Any, Any]]:
    """(name, type, field) of every option, ours first."""
    ours = [
        (f.name, f.type, dataclasses.field(default=f.default, metadata=f.metadata))
        if f.default_factory is dataclasses.MISSING
        else (f.name, f.type, dataclasses.field(default_factory=f.default_factory, metadata=f.metadata))
        for _, f in all_options()
    ]
    foreign = [
        (option.name, Any, dataclasses.field(default_factory=type(option.default)))
        if isinstance(option.default, dict | list)
        else (option.name, Any, dataclasses.field(default=option.default))
        for option in FOREIGN_OPTIONS.values()
    ]
    return ours + foreign


Options = dataclasses.make_dataclass("Options", flat_fields(), init=False, module=__name__)


class EngineArgs(Options):
    """Engine options by name; those that are not given have their defaults. Raises ConfigError for unknown names.

    Values are checked by `create_engine_config`.
    """

    def __init__(self, model: str = EMBEDDED_MODEL, **options: Any):
        fields = {f.name: f for f in dataclasses.fields(self)}
        for name in options:
            if name not in fields:
                raise ConfigError(f"unknown option {name!r}.{did_you_mean(name, fields)}")
        for name, f in fields.items():
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            setattr(self, name, options.get(name, default))
        self.model = model

    def create_engine_config(self) -> EngineConfig:
        """What engines are made from. Raises ConfigError for values out of range."""
        return EngineConfig.from_options(**vars(self))

    @staticmethod
    def add_cli_args[P: argparse._ActionsContainer](parser: P) -> P:
        """Give an argparse parser, or a group of one, a flag for every option; parsed arguments hold all of them."""
        add_engine_flags(parser, file_holds=None, own_names={})
        defaults = vars(EngineArgs())
        for action in parser._actions:
            if action.dest in defaults and action.default is argparse.SUPPRESS:
                action.default = defaults[action.dest]
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The options among parsed arguments."""
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in names})


class AsyncEngineArgs(EngineArgs):
    """The same options, for `AsyncLLM.from_engine_args`."""


class FlexibleArgumentParser(Parser):
    """An argparse parser that takes names of flags with _ as well as with -, and keys of JSON one by one."""
