"""A process that compiles grammars nobody has seen before, so that one that crashes the compiler crashes only this.

    python -m jaxpaged.core.grammar_probe

Reads lines of JSON, `StructuredOutputsParams` each, and answers each with a line of JSON: null, or what is wrong with
it. Whoever runs it sets the time limit; memory and stack are limited here. Bytes stand in for the vocabulary, which
is not known here.
"""

import json
import sys
import threading

import msgspec

from jaxpaged.core.grammar_text import error_of, grammar_text, import_llguidance, limits
from jaxpaged.errors import RequestError
from jaxpaged.structured_outputs import StructuredOutputsParams

STACK_BYTES = 4 * 2**20
MEMORY_BYTES = 2 * 2**30


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
    error = error_of(matcher)
    if error is None and matcher.is_stopped() and not matcher.is_accepting():
        error = "no text fits the grammar."
    return None if error is None else f"structured_outputs cannot be used: {error}"


def answer_lines() -> None:
    decoder = msgspec.json.Decoder(StructuredOutputsParams)
    for line in sys.stdin.buffer:
        print(json.dumps(problem_with(decoder.decode(line))), flush=True)


def main() -> None:
    """Answer until standard input ends."""
    limit_memory()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=answer_lines)
    thread.start()
    thread.join()


def limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
