"""What becomes of vLLM's options, as the guide to migrating shows it: `python -m tests.guides.option_tables` writes it.

Everything follows from the tables by which the engine and the server take options, and from vLLM's public list of them.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from jaxpaged.config.vllm_options import FOREIGN_OPTIONS, LEAVE_OUT, VALUES, ForeignOption
from jaxpaged.serving.foreign_options import FOREIGN_SERVER_OPTIONS
from jaxpaged.serving.options import ServerOptions
from tests.guides.guide_blocks import FOLDER
from tests.vllm_serve_names import ENGINE, SERVER

GUIDE = FOLDER / "migrating_from_vllm.md"
BEGIN, END = "<!-- written by python -m tests.guides.option_tables -->\n", "<!-- end of what is written -->\n"
OURS = {option.name for option in fields(ServerOptions)}  # some of them are foreign to the engine
FOREIGN = {name: each for name, each in {**FOREIGN_OPTIONS, **FOREIGN_SERVER_OPTIONS}.items() if name not in OURS}
SAMPLES: tuple[Any, ...] = ("x", 1, True, {"x": 1}, 1.5)


def flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def kinds() -> dict[str, list[ForeignOption]]:
    """Foreign options, by what becomes of them."""
    found: dict[str, list[ForeignOption]] = defaultdict(list)
    for option in FOREIGN.values():
        if option.becomes is not None:
            found["renamed"].append(option)
        elif option.why.startswith("it must be "):
            found["said" if option.word else "silent"].append(option)
        else:
            found["refused"].append(option)
    return found


def ours(option: ForeignOption) -> str:
    """The options that it becomes."""
    sample = next(value for value in SAMPLES if option.accepts(value))
    assert option.becomes is not None
    return ", ".join(
        flag(name) + (f", key `{next(iter(value))}`" if isinstance(value, Mapping) and value != sample else "")
        for name, value in option.becomes(sample).items()
    )


def sentence(text: str) -> str:
    """It with a full stop, and with a capital unless it begins with a name."""
    first = re.match(r"[a-z]+(?= )", text)
    text = text if first is None or first[0] in ("jax", "pages") else text[0].upper() + text[1:]
    return text.replace("|", "\\|").rstrip(".") + "."


def grouped(options: list[ForeignOption], *words: str) -> Iterator[str]:
    """Rows of the options that have the same `words`, attributes of an option."""
    rows = defaultdict(list)
    for option in options:
        texts = [getattr(option, word) for word in words]
        rows[" ".join(sentence(text) for text in texts if text != LEAVE_OUT)].append(flag(option.name))
    return (f"| {', '.join(names)} | {text} |" for text, names in rows.items())


def lines() -> Iterator[str]:
    found = kinds()
    yield from ("### The same", "", "These options have vLLM's names and meanings:", "")
    yield ", ".join(f"`--{name}`" for name in [*ENGINE, *SERVER] if name.replace("-", "_") not in FOREIGN) + "."
    yield from ("", "Some of their values are refused:", "", "| option | values | |", "|---|---|---|")
    for option, values in VALUES.items():
        texts = defaultdict(list)
        for value, text in values.items():
            texts[text].append(f"`{value}`")
        yield from (f"| {flag(option)} | {', '.join(names)} | {sentence(text)} |" for text, names in texts.items())
    yield from ("", "### Another name", "", "| vLLM | here |", "|---|---|")
    yield from (f"| {flag(option.name)} | {ours(option)} |" for option in found["renamed"])
    yield from ("", "### Accepted, without effect", "", "| option | why |", "|---|---|")
    yield from grouped(found["said"], "word")
    yield from ("", "These ask for nothing here, whatever their value is:", "")
    yield ", ".join(flag(option.name) for option in found["silent"]) + "."
    yield from ("", "### Refused", "", "Their default values pass. Where there is nothing to do, leave the option out.")
    yield from ("", "| option | why, and what to do |", "|---|---|")
    yield from grouped(found["refused"], "why", "do")


def written() -> str:
    return BEGIN + "\n" + "\n".join(lines()) + "\n\n" + END


def main() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    GUIDE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: written(), text, flags=re.S), encoding="utf-8")


if __name__ == "__main__":
    main()
