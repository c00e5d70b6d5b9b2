"""`--help`: what one needs first fits a screen, and everything else can be found."""

import argparse

import pytest

from jaxpaged.entrypoints.argument_parser import FIRST, MANY, shown_options
from jaxpaged.entrypoints.argument_parser import page as page_of
from jaxpaged.entrypoints.cli import FIRST_COMMANDS, command_line, main

SCREEN = 24, 80


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def shown(capsys):
    def show(*words):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert not end.value.code
        return capsys.readouterr().out

    return show


def parsers(parser, *names):
    """(words, parser) of every command, below other ones too."""
    yield names, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                yield from parsers(each, *names, name)


COMMANDS = dict(parsers(command_line()))


def flags_of(parser):
    """(flag, option) of all that are not hidden."""
    return [
        (option.option_strings[-1], option)
        for group in parser._action_groups
        for option in shown_options(group)
        if option.option_strings
    ]


def test_the_first_page_fits_a_screen_and_begins_with_what_one_needs_first(shown):
    lines = shown("--help").splitlines()
    rows, columns = SCREEN
    assert len(lines) < rows and max(map(len, lines)) <= columns
    first = lines.index("first steps:")
    assert [line.split()[0] for line in lines[first + 1 : first + 6]] == list(FIRST_COMMANDS)
    assert all(f"  {words[0]} " in "\n".join(lines) for words in COMMANDS if len(words) == 1)


@pytest.mark.parametrize("words", [(), ("bench",), ("kv",), ("buckets",)])
def test_a_command_alone_names_those_below_it(words, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    below = [each[-1] for each in COMMANDS if each[:-1] == words and each]
    assert below and all(name in said for name in below)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_is_on_the_page_of_all(words):
    everything = page_of(COMMANDS[words], "all")
    assert all(flag in everything for flag, _ in flags_of(COMMANDS[words]))


LARGE = [words for words, each in COMMANDS.items() if len(flags_of(each)) > MANY]


@pytest.mark.parametrize("words", LARGE, ids=" ".join)
def test_a_command_with_many_options_shows_the_first_ones_by_topic(words, shown):
    page = shown(*words, "--help")
    flags = {flag for flag, option in flags_of(COMMANDS[words]) if option.dest not in FIRST}
    said = " ".join(page.split())
    assert len(page.splitlines()) < 130 and "--help=all shows all" in said and " Topics: " in said
    assert any(f"{flag} " not in page for flag in flags)
    assert "usage: jaxpaged " + words[0] in page


def test_prose_fits_the_screen_and_examples_can_be_copied(shown):
    page = shown("bench", "serve", "--help")
    prose, _, examples = page.partition("examples:")
    assert all(len(line) <= 80 for line in prose.splitlines() if not line.startswith("  --"))
    commands = examples.strip().splitlines()
    assert max(map(len, commands)) > 80 and all(line.strip().startswith("jaxpaged bench serve ") for line in commands)


def test_help_is_found_by_a_word(shown):
    page = shown("serve", "--help=ssl_cert")
    assert "--ssl-certfile" in page and "--ssl-cert-reqs" in page and "--max-num-seqs" not in page
    assert "--block-size" in shown("serve", "--help=cache") and "--host" in shown("serve", "--help=all")


def test_what_most_people_need_first_exists():
    every = {option.dest for parser in COMMANDS.values() for _, option in flags_of(parser)}
    assert every >= FIRST
