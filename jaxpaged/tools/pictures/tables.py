"""Two columns of text, for terminals and for notebooks."""

import html
from collections.abc import Sequence

Line = tuple[str, str]


def text_table(lines: Sequence[Line]) -> str:
    """`name  value`, a line each, the values below each other."""
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def html_table(lines: Sequence[Line]) -> str:
    """The same as an HTML table; every text is escaped."""
    cell = "padding:2px 10px;text-align:left;vertical-align:top;white-space:pre-wrap"
    rows = "".join(
        f'<tr><th style="{cell}">{html.escape(name)}</th><td style="{cell}">{html.escape(value)}</td></tr>'
        for name, value in lines
    )
    return f"<table>{rows}</table>"
