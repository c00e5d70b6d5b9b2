"""An engine that echoes, in place of the real one, and a way to run commands with it."""

import dataclasses
import time
from types import SimpleNamespace

import pytest

from jaxpaged.entrypoints.cli import engine as engine_module
from jaxpaged.entrypoints.cli import main
from jaxpaged.errors import EngineError, RequestError
from jaxpaged.messages import CompletionOutput, Logprob, RequestMetrics, RequestOutput

CHARACTERS_PER_STEP = 3


class EchoInputs:
    """The input processor: a chat becomes `role:content|role:content`."""

    def __init__(self, template=True, defaults=None):
        self.chat_templates = SimpleNamespace(sources={"default": "..."} if template else {})
        self.defaults = SimpleNamespace(sampling=defaults or {})

    def chat_prompt(self, messages):
        if not self.chat_templates.sources:
            raise RequestError("the model has no chat template.", "chat_template")
        return {"prompt": "|".join(f"{message['role']}:{message['content']}" for message in messages)}


@dataclasses.dataclass
class Running:
    """A request that has been answered up to `shown` characters."""

    request_id: str
    prompt: str
    params: object
    shown: int = 0


class EchoEngine:
    """Answers a prompt with itself, three characters a step and a token a character; does what some prompts ask.

    A prompt with "refuse" is a bad request, "fail" fails while it runs, "crash" breaks the engine, and "interrupt"
    is the user's Ctrl-C.
    """

    def __init__(self, inputs):
        self.input_processor = inputs
        self.running = []
        self.loras = []  # the adapter of each prompt
        self.prompts = []
        self.params = []
        self.aborted = []
        self.records = []
        self.is_shut_down = False

    def add_request(self, request_id, prompt, params, lora_request=None):
        text = prompt if isinstance(prompt, str) else prompt.get("prompt", prompt)
        if not text or "refuse" in str(text):
            raise RequestError(f"the prompt {text!r} is refused.")
        self.loras.append(lora_request)
        self.prompts.append(prompt)
        self.params.append(params)
        self.running.append(Running(request_id, str(text), params))

    def step(self):
        outputs = [self._advance(request) for request in self.running]
        self.running = [r for r, output in zip(self.running, outputs) if not output.finished]
        return outputs

    def _advance(self, request):
        if "crash" in request.prompt:
            raise EngineError("the step failed.\nIt will not work again.")
        if "interrupt" in request.prompt:
            raise KeyboardInterrupt
        length = min(len(request.prompt), request.params.max_tokens or 10**9)
        request.shown = min(request.shown + CHARACTERS_PER_STEP, length)
        failed = "fail" in request.prompt
        end = "length" if length < len(request.prompt) else "stop"
        reason = "error" if failed else end if request.shown == length else None
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(range(len(request.prompt))),
            prompt_logprobs=[None, {5: Logprob(-1.5, 2, "x")}] if request.params.prompt_logprobs else None,
            outputs=[self._completion(request, index, reason) for index in range(request.params.n)],
            finished=reason is not None,
            metrics=RequestMetrics(time.time() - 1.0, time.time() - 0.5, time.time()),
            num_cached_tokens=2,
            error="its logits are not numbers." if failed else None,
        )

    def _completion(self, request, index, reason):
        text = request.prompt[: request.shown]
        logprobs = [{ord(c): Logprob(-0.5, 1, c), 7: Logprob(float("-inf"), 9, "?")} for c in text]
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=[ord(c) for c in text],
            cumulative_logprob=-0.5 * len(text),
            logprobs=logprobs if request.params.logprobs is not None else None,
            finish_reason=reason,
        )

    def abort_request(self, request_ids):
        self.aborted += request_ids
        self.running = [request for request in self.running if request.request_id not in request_ids]

    def has_unfinished_requests(self):
        return bool(self.running)

    num_ready = 4

    def executor_stats(self):
        return {
            "steps": 4,
            "scheduled_tokens": 60,
            "padded_tokens": 20,
            "bucket_steps": {16: 3, 32: 1},
            "programs": 6,
            "programs_ready": 5,
            "ordinary_programs": 4,
            "ordinary_programs_ready": self.num_ready,
            "compile_seconds": 1.25,
            "recompiles": 0,
        }

    def step_records(self):
        return self.records, 0

    def shutdown(self):
        self.is_shut_down = True


@dataclasses.dataclass
class Finished:
    """What a command left behind."""

    status: int
    out: str
    err: str
    engine: EchoEngine
    options: dict  # of the engine


@pytest.fixture
def run(monkeypatch, capsys):
    """`run("generate", "Hello", inputs=...)`: a command with an echoing engine."""

    def run_command(*arguments, inputs=None):
        echo, seen = EchoEngine(inputs or EchoInputs()), {}

        def open_echo(options, progress):
            progress("weights", 1, 2)
            seen.update(options)
            return echo

        monkeypatch.setattr(engine_module, "open_engine", open_echo)
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return Finished(status, captured.out, captured.err, echo, seen)

    return run_command


@pytest.fixture
def piped(monkeypatch):
    """`piped("text")` puts text on standard input."""

    def pipe(text):
        import io

        stream = io.TextIOWrapper(io.BytesIO(text.encode() if isinstance(text, str) else text), encoding="utf-8")
        monkeypatch.setattr("sys.stdin", stream)

    return pipe
