"""The parser of command lines: errors in one line, vLLM's spellings of flags, and help that a screen has room for.

`--max_model_len 5` is `--max-model-len 5`. Keys of a JSON option may be given one by one: `--kv-transfer-config.kv_role
kv_both`, with a `+` at the end for one more entry of a list. `--help` shows of a command with many options those that
most people need, by topic; `--help=all` shows every one, and `--help=WORD` those about a word.

This module knows some options by name, and no command.
"""

import argparse
import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from jaxpaged.entrypoints.option_flags import json_or_text
from jaxpaged.entrypoints.terminal import fitted
from jaxpaged.errors import did_you_mean

KEY = re.compile(r"(?P<flag>--?[A-Za-z][\w-]*)\.(?P<path>[\w.-]+)(?P<more>\+?)(=(?P<value>.*))?", re.DOTALL)
MANY = 45
"""Options of a command that are no longer shown all at once."""
FIRST = frozenset(
    """
    model dtype quantization max_model_len chat_template tensor_parallel_size max_num_seqs max_num_batched_tokens
    gpu_memory_utilization kv_offload speculative_config host port served_model_name api_key_file grpc_port
    enable_auto_tool_choice tool_call_parser reasoning_parser log_level
    temperature top_p top_k max_tokens seed n stop server base_url backend dataset_name num_prompts request_rate
    max_concurrency
    """.split()
)
"""Options that most people need."""
WORD_FLAG = "--help-about"
"""How `--help=WORD` reaches the parser."""


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


# ---- words in the one spelling that flags have here --------------------------------------------------


def plain_words(words: Sequence[str]) -> list[str]:
    """The words with dashes in names of flags, and with one word of JSON for all keys of a flag. What follows `--` and
    what is no flag stays as it is."""
    end = words.index("--") if "--" in words else len(words)
    before, plain = list(words[:end]), list[str]()
    objects: dict[str, tuple[int, dict[str, Any]]] = {}  # of each flag that came with keys: the place of its JSON
    while before:
        word = before.pop(0)
        found = KEY.fullmatch(word)
        if found is None:
            plain.append(dashed(word))
            continue
        flag = dashed(found["flag"])
        if flag not in objects:
            objects[flag] = len(plain) + 1, {}
            plain += [flag, ""]
        value = found["value"] if found["value"] is not None else before.pop(0) if before else ""
        put(objects[flag][1], found["path"].split("."), json_or_text(value), more=bool(found["more"]))
    for place, content in objects.values():
        plain[place] = json.dumps(content)
    return [*plain, *words[end:]]


def put(content: dict[str, Any], path: Sequence[str], value: Any, more: bool) -> None:
    """Write a value where the path leads in nested objects; with `more` as one more entry of a list."""
    for key in path[:-1]:
        inner = content.get(key)
        content[key] = inner if isinstance(inner, dict) else {}
        content = content[key]
    if more:
        listed = content.get(path[-1])
        value = [*(listed if isinstance(listed, list) else []), value]
    content[path[-1]] = value


def dashed(word: str) -> str:
    """`--max_model_len=5` as `--max-model-len=5`; what is no flag stays as it is."""
    if not word.startswith("--"):
        return word
    if word.startswith("--help="):
        return WORD_FLAG + word.removeprefix("--help")
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


# ---- help --------------------------------------------------------------------------------------------


class HelpAbout(argparse.Action):
    """Prints the options about a word, and ends."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, word: object, flag: str | None = None
    ) -> None:
        print(page(parser, str(word)), end="")
        parser.exit()


def page(parser: argparse.ArgumentParser, word: str | None = None) -> str:
    """The help of a command: about a word, about everything for "all", without one about what most people need."""
    groups = {group: shown_options(group) for group in parser._action_groups}
    total = sum(map(len, groups.values()))
    if word is None and total > MANY:
        chosen = {group: [each for each in options if is_first(group, each)] for group, options in groups.items()}
    elif word is None or word == "all":
        chosen = groups
    else:
        chosen = {group: [each for each in options if is_about(group, each, word)] for group, options in groups.items()}
    formatter = parser._get_formatter()
    usage = parser.usage or ("%(prog)s [options]" if total > MANY else None)
    formatter.add_usage(usage, parser._actions, parser._mutually_exclusive_groups)
    columns = formatter._width
    formatter.add_text(parser.description and fitted(parser.description, columns))
    for group, options in chosen.items():
        formatter.start_section(group.title)
        formatter.add_text(group.description if options else None)
        formatter.add_arguments(options)
        formatter.end_section()
    if sum(map(len, chosen.values())) < total:
        formatter.add_text(fitted(way_to_others(groups, total), columns))
    if word is None and parser.epilog:
        formatter.add_text(reflowed(parser.epilog, columns))
    return formatter.format_help()


def reflowed(text: str, columns: int) -> str:
    """A text in lines of this width. Lists keep their lines; examples are copied, so they are not broken."""
    prose, *examples = text.partition("examples:\n")
    paragraphs = prose.split("\n\n")
    joined = [each if "\n " in f"\n{each}" else " ".join(each.split("\n")) for each in paragraphs]
    return "\n\n".join(fitted(each, columns) for each in joined) + "".join(examples)


def shown_options(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    return [each for each in group._group_actions if each.help is not argparse.SUPPRESS]


def is_first(group: argparse._ArgumentGroup, option: argparse.Action) -> bool:
    """Whether it is the command's own, or one that most people need."""
    return group.title in ("positional arguments", "options") or option.dest in FIRST


def is_about(group: argparse._ArgumentGroup, option: argparse.Action, word: str) -> bool:
    """Whether the word is in the topic, in the name, or in what the help says."""
    texts = (group.title or "", *option.option_strings, option.help or "")
    return any(word.lower().replace("_", "-") in text.lower() for text in texts)


def way_to_others(groups: Mapping[argparse._ArgumentGroup, Collection[argparse.Action]], total: int) -> str:
    """How the options are seen that are not shown."""
    topics = [
        f"{topic_of(group)} ({len(options)})"
        for group, options in groups.items()
        if options and group.title not in ("positional arguments", "options")
    ]
    return f"--help=all shows all {total} options, --help=WORD those about a word. Topics: {', '.join(topics)}."


def topic_of(group: argparse._ArgumentGroup) -> str:
    return (group.title or "").removeprefix("engine: ")
