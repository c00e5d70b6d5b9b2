"""The table of architectures in the guide to models: `python -m tests.guides.model_tables` writes it.

It is what `jaxpaged models --supported` prints, from the same list.
"""

import re
from collections.abc import Iterator

from jaxpaged.models.known import KNOWN
from tests.guides.guide_blocks import FOLDER

GUIDE = FOLDER / "models.md"
BEGIN, END = "<!-- written by python -m tests.guides.model_tables -->\n", "<!-- end of what is written -->\n"


def lines() -> Iterator[str]:
    yield from ("| architecture in `config.json` | models | reads | in GGUF |", "|---|---|---|---|")
    for known in KNOWN:
        models, reads = (re.sub(r"--[\w-]+", r"`\g<0>`", text) for text in (", ".join(known.models), known.reads))
        yield f"| `{known.architecture}` | {models} | {reads} | {f'`{known.gguf}`' if known.gguf else '-'} |"


def written() -> str:
    return BEGIN + "\n" + "\n".join(lines()) + "\n\n" + END


def main() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    GUIDE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: written(), text, flags=re.S), encoding="utf-8")


if __name__ == "__main__":
    main()
