"""What `--help` shows: of a command with many options those that most people need, by topic.

`--help=all` shows every one, and `--help=WORD` those about a word.

This module knows some options by name, and no command.
"""

import argparse
from collections.abc import Collection, Mapping

from jaxpaged.entrypoints.terminal import fitted

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
"""How `--help=WORD` reaches the parser (`command_words.py`)."""


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
