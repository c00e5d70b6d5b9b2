"""One start of an engine in a process of its own, from `{"origin": ..., "options": {...}}` on standard input.

`origin` is when the process was started, in seconds since the epoch. The last line of standard output is a JSON object:
what was measured, or an "error". `python -m` runs this module; it is no command for people.
"""

import json
import os
import sys
import time
from typing import Any

from jaxpaged.entrypoints.cli import collect_seldom
from jaxpaged.errors import JaxpagedError

SHORT_PROMPT = tuple(range(5, 25))
POLL_SECONDS = 0.005


def first_token(engine: Any) -> None:
    """Return once a short request has its first token."""
    from jaxpaged.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    engine.add_request("first", {"prompt_token_ids": list(SHORT_PROMPT)}, params)
    while not any(output.outputs[0].token_ids for output in engine.step()):
        pass


def finish(engine: Any) -> None:
    """Run the request to its end: while a step is in flight, programs that nobody waits for are hardly compiled."""
    while engine.has_unfinished_requests():
        engine.step()


def measure(origin: float, options: dict[str, Any]) -> dict[str, Any]:
    """Start an engine as the command line does, up to the point at which it serves ordinary requests at full speed."""
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.llm_engine import LLMEngine

    begin = time.time()
    engine = LLMEngine.from_config(EngineConfig.from_options(**options))
    first_token(engine)
    told = {"first_token_time": time.time() - origin}
    finish(engine)
    while True:
        stats = engine.executor_stats()
        if stats["ordinary_programs_ready"] == stats["ordinary_programs"]:
            break
        time.sleep(POLL_SECONDS)
    return told | {
        "startup_time": time.time() - begin,
        "compilation_time": stats["compile_seconds"],
        "programs": stats["programs"],
    }


def main() -> None:
    collect_seldom()
    job = json.loads(sys.stdin.read())
    try:
        told = measure(job["origin"], job["options"])
    except JaxpagedError as error:
        told = {"error": " ".join(str(error).split())}
    print(json.dumps(told), flush=True)
    os._exit(0)  # as the command does: programs that nobody waits for are still being compiled


if __name__ == "__main__":
    main()
