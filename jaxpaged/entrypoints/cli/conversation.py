"""The messages of a chat and the turns that add to them: what the user says, and the streamed answer.

Where answers come from is not known here: an engine in this process (`local_answers`), or a server (`server_answers`).
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxpaged.entrypoints.terminal import WordWrap, columns_of, complain, printable, styled
from jaxpaged.errors import JaxpagedError, RequestError, UsageError


@dataclass(frozen=True)
class Answer:
    """What came of a question. `seconds` are from the first token to the last, those of compiling left out."""

    text: str
    finish_reason: str | None = None
    num_tokens: int | None = None
    first_token_seconds: float | None = None
    seconds: float | None = None

    def speed(self) -> str:
        """A line for people; empty where nothing was measured."""
        parts = [] if self.num_tokens is None else [f"{self.num_tokens} tokens"]
        if self.num_tokens is not None and self.num_tokens > 1 and self.seconds:
            parts.append(f"{(self.num_tokens - 1) / self.seconds:.1f} tokens/s")
        if self.first_token_seconds is not None:
            parts.append(f"the first after {self.first_token_seconds:.2f} s")
        return ", ".join(parts)


class Answers(Protocol):
    """Who answers. An interrupt ends the answer, and reaches the caller."""

    default_max_tokens: int | None  # that holds when nothing else was said

    def ask(self, messages: list[dict[str, Any]], given: Mapping[str, Any], show: Callable[[str], None]) -> Answer:
        """Stream an answer's text to `show`. `given` are sampling parameters. Raises JaxpagedError."""


class Conversation:
    """A chat; `given` are the sampling parameters that were set."""

    def __init__(self, answers: Answers, given: Mapping[str, Any], system: str | None = None):
        self.answers = answers
        self.given = dict(given)
        self.file: Path | None = None  # that it was saved to
        self.clear(system)

    def clear(self, system: str | None) -> None:
        """Forget everything and start with this system message, if any."""
        self.system = system
        self.pictures: list[dict[str, Any]] = []  # that the next message is about
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> bool:
        """One turn. A turn that fails or is interrupted leaves the conversation as it was; False when it failed."""
        content = [*self.pictures, {"type": "text", "text": text}] if self.pictures else text
        return self._answer([*self.messages, {"role": "user", "content": content}])

    def regenerate(self) -> bool:
        """Answer the last message once more. Raises UsageError before the first one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UsageError("there is no answer yet.")
        return self._answer(self.messages[:-1])

    def save(self, path: str) -> None:
        """Write the messages as a JSON line that `jaxpaged generate --file` reads. Raises UsageError.

        A file that is there already is overwritten only if this conversation wrote it.
        """
        file = Path(path).expanduser()
        if file.exists() and file != self.file:
            raise UsageError(f"{file} exists already. Choose another name.")
        try:
            file.write_text(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {file}: {error.strerror}. Choose another name.") from None
        self.file = file

    def _answer(self, messages: list[dict[str, Any]]) -> bool:
        shown: list[bool] = []
        screen = on_screen()

        def show(text: str) -> None:
            shown.append(bool(text))
            screen.write(printable(text, sys.stdout))
            sys.stdout.flush()

        try:
            try:
                answer = self.answers.ask(messages, self.given, show)
            finally:
                screen.end()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            end_line()
            complain("jaxpaged chat", "stopped; the turn is forgotten.")
            return True
        except JaxpagedError as error:
            if any(shown):
                end_line()
            hint = " Use /clear to start over." if isinstance(error, RequestError) else ""
            complain("jaxpaged chat", f"{error}{hint}")
            return False
        end_line()
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.pictures = []
        self._remark(answer)
        return True

    def _remark(self, answer: Answer) -> None:
        """What there is to say about an answer, on standard error."""
        limit = self.answers.default_max_tokens
        if answer.finish_reason == "length" and "max_tokens" not in self.given and limit is not None:
            complain(
                "jaxpaged chat",
                f"the answer was cut after {limit} tokens. For longer ones: /set max_tokens N, "
                "or none for as many as the context holds (--max-tokens).",
            )
        if sys.stdin.isatty() and answer.speed():
            print(styled(f"({answer.speed()})", "dim", sys.stderr), file=sys.stderr, flush=True)


def on_screen() -> WordWrap:
    """Where an answer is written: in lines as wide as the terminal, if there is one."""
    return WordWrap(sys.stdout.write, columns_of(sys.stdout) if sys.stdout.isatty() else None)


def end_line() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()
