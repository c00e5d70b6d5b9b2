"""The messages of a chat and the turn that adds two to them: what the user says, and the streamed answer."""

import sys
from collections.abc import Mapping
from typing import Any

from jaxpaged.entrypoints.cli.engine import Engine, request_params
from jaxpaged.entrypoints.cli.terminal import complain, printable
from jaxpaged.errors import RequestError
from jaxpaged.messages import RequestOutput


class Conversation:
    """A chat with one engine; `given` are the sampling parameters from the command line."""

    def __init__(self, engine: Engine, given: Mapping[str, Any], system: str | None = None):
        self.engine = engine
        self.given = given
        self.num_turns = 0
        self.clear(system)

    def clear(self, system: str | None) -> None:
        """Forget everything and start with this system message, if any."""
        self.system = system
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> bool:
        """One turn. A turn that fails or is interrupted leaves the conversation as it was; False when it failed."""
        messages = [*self.messages, {"role": "user", "content": text}]
        request_id = f"turn-{self.num_turns}"
        self.num_turns += 1
        try:
            prompt = self.engine.input_processor.chat_prompt(messages)
            self.engine.add_request(request_id, prompt, request_params(self.engine, self.given, chat=True))
            output = self._stream(request_id)
        except RequestError as error:
            complain("jaxpaged chat", f"{error} Use /clear to start over.")
            return False
        if output is None or output.error is not None:
            complain("jaxpaged chat", output.error if output and output.error else "stopped; the turn is forgotten.")
            return output is None
        self.messages = [*messages, {"role": "assistant", "content": output.outputs[0].text}]
        return True

    def _stream(self, request_id: str) -> RequestOutput | None:
        """Print the answer as it comes. None when the user interrupted it."""
        shown, last = 0, None
        try:
            while self.engine.has_unfinished_requests():
                for last in self.engine.step():
                    text = last.outputs[0].text
                    sys.stdout.write(printable(text[shown:], sys.stdout))
                    sys.stdout.flush()
                    shown = len(text)
        except KeyboardInterrupt:
            self.engine.abort_request([request_id])
            last = None
            if not sys.stdin.isatty():
                raise
        sys.stdout.write("\n")
        sys.stdout.flush()
        return last
