"""How results look in a notebook.

`RequestOutput` is a message and knows nothing of display, so its HTML is registered with IPython when an `LLM` is
made inside it. Nothing is imported for that: outside of IPython nothing happens. Pictures of a prompt are shown small,
as long as a processor cache has them.
"""

import html
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from jaxpaged.engine.input.processor import InputProcessor
from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.messages import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from jaxpaged.engine.input.pictures import PictureIntake

MAX_PROMPT_LENGTH = 400
MAX_PICTURES = 8
ROLES = "system|developer|user|assistant|model|tool|ipython"
QUIET = "color:#777777"


def show_results_in_notebooks(markers: Iterable[str] = (), pictures: "PictureIntake | None" = None) -> None:
    """Register the HTML of results with the IPython that runs this code, if one does.

    `markers` are the model's special tokens, which are left out of prompts, and `pictures` has those of its prompts:
    both in addition to those of earlier models.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    formatter = shell.display_formatter.formatters["text/html"]
    shown = getattr(formatter.type_printers.get(list), "markers", None)
    if shown is not None:  # an earlier LLM did the rest
        shown.update(markers)
        seen = formatter.type_printers[list].intakes
    else:
        shown, seen = set(markers), weakref.WeakSet()
        formatter.for_type(RequestOutput, lambda output: output_html(output, shown, seen))
        formatter.for_type(list, list_html(formatter.type_printers.get(list), shown, seen))
    if pictures is not None:
        seen.add(pictures)


def show_results_of(processor: InputProcessor) -> None:
    """Register the HTML of results of the model that this makes requests for."""
    show_results_in_notebooks(markers_of(processor.tokenizer), processor.pictures)


def markers_of(tokenizer: Tokenizer) -> set[str]:
    """The texts of special tokens."""
    return {tokenizer.added_tokens[token_id] for token_id in tokenizer.special_ids}


def list_html(
    otherwise: Callable[[list], str | None] | None,
    markers: Collection[str] = (),
    intakes: "Collection[PictureIntake]" = (),
) -> Callable[[list], str | None]:
    """HTML of a list of results; any other list looks as it did before."""

    def show(values: list) -> str | None:
        if values and all(isinstance(value, RequestOutput) for value in values):
            return "".join(output_html(value, markers, intakes) for value in values)
        return otherwise(values) if otherwise else None

    show.markers, show.intakes = markers, intakes
    return show


def output_html(output: RequestOutput, markers: Collection[str] = (), intakes: "Collection[PictureIntake]" = ()) -> str:
    """A result: its pictures, the prompt in grey, the answers, and a line of facts. All text is escaped."""
    given = output.prompt
    prompt = f"{len(output.prompt_token_ids)} token ids" if given is None else readable_prompt(given, markers)
    if len(prompt) > MAX_PROMPT_LENGTH:
        prompt = f"{prompt[:MAX_PROMPT_LENGTH]} …"
    answers = "".join(answer_html(completion, len(output.outputs) > 1) for completion in output.outputs)
    error = f'<div style="color:#D55E00">{html.escape(output.error)}</div>' if output.error else ""
    return (
        '<div style="border-left:3px solid #0072B2;padding:2px 12px;margin:8px 0;white-space:pre-wrap">'
        f'{pictures_html(output, intakes)}<div style="{QUIET}">{html.escape(prompt)}</div>{answers}{error}'
        f'<div style="{QUIET};font-size:85%">{html.escape(facts(output))}</div></div>'
    )


def pictures_html(output: RequestOutput, intakes: "Collection[PictureIntake]") -> str:
    """The first pictures of a prompt, small; words for those that no cache has."""
    if not output.mm_hashes:
        return ""
    keys = [key for modality in ("image", "video") for key in output.mm_hashes.get(modality, ())]
    shown = [picture_html(number, key, intakes) for number, key in enumerate(keys[:MAX_PICTURES], 1)]
    more = f" and {len(keys) - MAX_PICTURES} more" if len(keys) > MAX_PICTURES else ""
    return f'<div style="{QUIET}">{" ".join(shown)}{more}</div>'


def picture_html(number: int, key: str, intakes: "Collection[PictureIntake]") -> str:
    """One picture, by its key in hexadecimal."""
    for intake in intakes:
        pixels = intake.thumbnail(bytes.fromhex(key))
        if pixels is not None:
            from jaxpaged.multimodal.thumbnails import data_url

            url = data_url(pixels)
            return f'<img src="{url}" alt="picture {number}" title="picture {number}" style="max-height:72px">'
    return f"[picture {number}]"


def readable_prompt(prompt: str, markers: Collection[str]) -> str:
    """A prompt without its markers. Where they make a chat of it, `role: what was said`, a line each."""
    names = sorted(filter(None, markers), key=len, reverse=True)
    pieces = re.split("|".join(map(re.escape, names)), prompt) if names else [prompt]
    if len(pieces) == 1:
        return prompt
    lines, role = [], ""
    for piece in pieces:
        said = piece.strip()
        named = re.match(rf"({ROLES})(?:\s*\n|$)", said)
        if named:
            role, said = f"{named[1]}: ", said[named.end() :].strip()
        if said:
            lines.append(role + said)
            role = ""
    return "\n".join(lines)


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
