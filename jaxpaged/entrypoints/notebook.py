"""How results look in a notebook.

`RequestOutput` is a message and knows nothing of display, so its HTML is registered with IPython when an `LLM` is
made inside it. Nothing is imported for that: outside of IPython nothing happens.
"""

import html
import sys
from collections.abc import Callable
from typing import Any

from jaxpaged.messages import CompletionOutput, RequestOutput

MAX_PROMPT_LENGTH = 400
QUIET = "color:#777777"


def show_results_in_notebooks() -> None:
    """Register the HTML of results with the IPython that runs this code, if one does."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    formatter = shell.display_formatter.formatters["text/html"]
    formatter.for_type(RequestOutput, output_html)
    if getattr(formatter.type_printers.get(list), "shows_results", False):
        return  # an earlier LLM did it
    formatter.for_type(list, list_html(formatter.type_printers.get(list)))


def list_html(otherwise: Callable[[list], str | None] | None) -> Callable[[list], str | None]:
    """HTML of a list of results; any other list looks as it did before."""

    def show(values: list) -> str | None:
        if values and all(isinstance(value, RequestOutput) for value in values):
            return "".join(map(output_html, values))
        return otherwise(values) if otherwise else None

    show.shows_results = True
    return show


def output_html(output: RequestOutput) -> str:
    """A result: the prompt in grey, the answers, and a line of facts. All text is escaped."""
    prompt = output.prompt if output.prompt is not None else f"{len(output.prompt_token_ids)} token ids"
    if len(prompt) > MAX_PROMPT_LENGTH:
        prompt = f"{prompt[:MAX_PROMPT_LENGTH]} …"
    answers = "".join(answer_html(completion, len(output.outputs) > 1) for completion in output.outputs)
    error = f'<div style="color:#D55E00">{html.escape(output.error)}</div>' if output.error else ""
    return (
        '<div style="border-left:3px solid #0072B2;padding:2px 12px;margin:8px 0;white-space:pre-wrap">'
        f'<div style="{QUIET}">{html.escape(prompt)}</div>{answers}{error}'
        f'<div style="{QUIET};font-size:85%">{html.escape(facts(output))}</div></div>'
    )


def answer_html(completion: CompletionOutput, numbered: bool) -> str:
    number = f'<span style="{QUIET}">[{completion.index}] </span>' if numbered else ""
    return f"<div>{number}{html.escape(completion.text)}</div>"


def facts(output: RequestOutput) -> str:
    """Lengths, why it ended, and how fast it was, on one line."""
    length = sum(len(completion.token_ids) for completion in output.outputs)
    reasons = sorted({completion.finish_reason or "running" for completion in output.outputs})
    words = [f"{len(output.prompt_token_ids)} tokens in", f"{length} out", f"end: {', '.join(reasons)}"]
    if output.num_cached_tokens:
        words.insert(1, f"{output.num_cached_tokens} cached")
    times: Any = output.metrics
    if times is not None and times.finished_time is not None and times.first_token_time is not None:
        words.append(f"first token after {times.first_token_time - times.arrival_time:.2f} s")
        words.append(f"all after {times.finished_time - times.arrival_time:.2f} s")
    return " · ".join(words)
