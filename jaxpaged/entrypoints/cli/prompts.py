"""Prompts of `jaxpaged generate`: from arguments, a file, or standard input. Knows nothing of engines.

A file holds one prompt a line, or JSON lines: an object with "prompt" (a text, or a list of token ids) or
"messages" (a chat). It holds JSON lines when its first line is such an object.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.errors import RequestError, UsageError, did_you_mean

KEYS = ("prompt", "messages")


@dataclass(frozen=True)
class PromptSource:
    """One prompt as it was given: text, token ids, or chat messages; or the error that it is none of them."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    error: RequestError | None = None

    @property
    def title(self) -> str:
        """A line that tells prompts apart."""
        if self.messages:
            last = self.messages[-1]
            return str(last.get("content", last) if isinstance(last, dict) else last)
        return f"{len(self.token_ids)} token ids" if self.token_ids is not None else self.text or ""


def collect_prompts(arguments: Sequence[str], file: str | None, prompt_files: Sequence[str] = ()) -> list[PromptSource]:
    """All prompts: arguments, then whole files, then lines. Without any, those of standard input are read.

    Raises UsageError when there are none.
    """
    sources = [PromptSource(text=text) for text in arguments]
    if [file, *prompt_files].count("-") > 1:
        raise UsageError("standard input (-) is given twice, and it can be read once. Leave one of them out.")
    sources += [PromptSource(text=whole_text(path)) for path in prompt_files]
    if file is not None:
        sources += parse_lines(read_text(file))
    elif not sources:
        if sys.stdin.isatty():
            raise UsageError("there is no prompt. Give one in quotes, or --prompt-file FILE, or pipe text in.")
        sources = parse_lines(read_text("-"))
    if not sources:
        raise UsageError(f"there is no prompt in {file or 'standard input'}. Put one on each line.")
    return sources


def whole_text(file: str) -> str:
    """The one prompt of a file, without the end of its last line, which editors write. Raises UsageError."""
    text = read_text(file, "--prompt-file")
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def read_text(file: str, flag: str = "--file") -> str:
    """The text of a file; `-` is standard input. Raises UsageError when it cannot be read."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}. Check the path after {flag}.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text at byte {error.start}. Convert it.") from None


def parse_lines(text: str) -> list[PromptSource]:
    """One source a line; empty lines are skipped. A damaged first line does not make JSON lines plain text."""
    # Not splitlines(): a form feed or U+2028 inside a prompt ends no line.
    lines = [line for raw in text.split("\n") if (line := raw.removesuffix("\r")).strip()]
    if lines and lines[0].lstrip().startswith("{") and any(map(is_json_prompt, lines)):
        return [parse_json_line(line) for line in lines]
    return [PromptSource(text=line) for line in lines]


def is_json_prompt(line: str) -> bool:
    try:
        value = json.loads(line)
    except ValueError:
        return False
    return isinstance(value, dict) and not value.keys().isdisjoint(KEYS)


def parse_json_line(line: str) -> PromptSource:
    """A line of JSON as a source; what is wrong with it becomes the source's error, so that others go on."""
    try:
        return checked_object(json.loads(line))
    except RequestError as error:
        return PromptSource(text=line, error=error)
    except ValueError as error:
        return PromptSource(text=line, error=RequestError(f"the line is not JSON: {error}. Correct it."))


def checked_object(value: Any) -> PromptSource:
    if not isinstance(value, dict):
        raise RequestError(f'the line holds {value!r}; it must be an object such as {{"prompt": "Hello"}}.')
    for key in value:
        if key not in KEYS:
            raise RequestError(f"unknown key {key!r}.{did_you_mean(key, KEYS) or ' Known are prompt and messages.'}")
    if len(value) != 1:
        raise RequestError(f"the line has the keys {list(value)}; it must have either prompt or messages.")
    if "messages" in value:
        if not isinstance(value["messages"], list) or not value["messages"]:
            raise RequestError(f"messages is {value['messages']!r}; it must be a list of roles and contents.")
        return PromptSource(messages=value["messages"])
    prompt = value["prompt"]
    if isinstance(prompt, list):
        return PromptSource(token_ids=prompt)
    if not isinstance(prompt, str):
        raise RequestError(f"prompt is {prompt!r}; it must be a text or a list of token ids.")
    return PromptSource(text=prompt)
