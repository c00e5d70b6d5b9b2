"""A process that compiles new grammars first, so that a grammar which crashes the compiler crashes only this process.

    python -m jaxpaged.core.grammar.probe

It reads lines of JSON, each a `StructuredOutputsParams`, and answers each with a line of JSON: the problem, or null,
and the seconds of computing. Beyond its limits of computing time, memory and stack it dies without an answer. Bytes
stand in for the vocabulary, which is not known here.
"""

import json
import signal
import sys
import threading
import time

import msgspec

from jaxpaged.core.grammar.text import error_of, grammar_text, import_llguidance, limits
from jaxpaged.errors import RequestError
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams

STACK_BYTES = 4 * 2**20
MEMORY_BYTES = 2 * 2**30
CPU_SECONDS = 5
"""For one grammar; ordinary ones take milliseconds."""


def problem_with(params: StructuredOutputsParams) -> str | None:
    """What is wrong with a grammar; None: it can be compiled, and allows a first byte."""
    try:
        text = grammar_text(params)
    except RequestError as error:
        return str(error)
    llguidance = import_llguidance()
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), text, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    problem = error_of(matcher)
    if problem is None and matcher.is_stopped() and not matcher.is_accepting():
        problem = "no text fits the grammar."
    return None if problem is None else f"structured_outputs cannot be used: {problem}"


def answer_lines() -> None:
    decoder = msgspec.json.Decoder(StructuredOutputsParams)
    for line in sys.stdin.buffer:
        limit_computing(CPU_SECONDS)
        before = time.process_time()
        problem = problem_with(decoder.decode(line))
        limit_computing(0)
        print(json.dumps([problem, time.process_time() - before]), flush=True)


def limit_computing(seconds: float) -> None:
    """End this process with SIGPROF when it has computed for so long from now; 0: no more. Waiting does not count."""
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
    except AttributeError:  # Windows
        return


def main() -> None:
    """Answer until standard input ends."""
    limit("RLIMIT_AS", MEMORY_BYTES)
    limit("RLIMIT_CORE", 0)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=answer_lines)
    thread.start()
    thread.join()


def limit(name: str, value: int) -> None:
    """Set the soft limit of a resource of this process, where the system has such limits."""
    try:
        import resource
    except ImportError:  # Windows
        return
    which = getattr(resource, name)
    resource.setrlimit(which, (value, resource.getrlimit(which)[1]))


if __name__ == "__main__":
    main()
