"""`jaxpaged bench throughput`: requests and tokens a second of an engine that gets everything at once.

This module knows flags and figures; the engine is `LLM`, or `AsyncLLM` in a process of its own.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.errors import UsageError
from jaxpaged.tools.bench.flags import add_dataset_flags
from jaxpaged.tools.bench.offline import (
    add_generation_flags,
    add_offline_flags,
    check_at_least,
    check_json_path,
    open_llm,
    options_of,
    write_json,
)

if TYPE_CHECKING:
    from jaxpaged.messages import RequestOutput
    from jaxpaged.sampling_params import SamplingParams
    from jaxpaged.tools.bench.client_text import ClientText
    from jaxpaged.tools.bench.requests import BenchRequest

EPILOG = """\
Answers are as long as the dataset says.

exit status: 0 every request was answered; 1 some failed; 2 wrong usage

examples:
  jaxpaged bench throughput --num-prompts 100 --input-len 128 --output-len 32
  jaxpaged bench throughput --async-engine --dataset-name custom --dataset-path prompts.jsonl
"""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "throughput",
        help="requests and tokens a second of an engine",
        usage="%(prog)s [MODEL] [options]",
        epilog=EPILOG,
    )
    add_offline_flags(parser, [("n", 1, "answers per prompt")])
    parser.add_argument(
        "--backend",
        choices=("vllm", "vllm-chat"),
        default="vllm",
        help="vllm: continue prompts; vllm-chat: answer them as chats (default: vllm)",
    )
    parser.add_argument(
        "--async-engine", action="store_true", help="with the engine core in a process of its own, as the server has it"
    )
    add_dataset_flags(parser)
    add_generation_flags(parser)
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report. Returns the exit status."""
    from jaxpaged.entrypoints.cli.serve import run_loop
    from jaxpaged.tools.bench.datasets import check_dataset

    check_at_least(args, 1, "n")
    check_dataset(args)
    check_json_path(args.output_json)
    options = options_of(args, seed=args.seed)
    if args.async_engine:
        seconds, outputs, model = run_loop(in_another_process(args, options))
    else:
        with open_llm(options) as llm:
            processor, model = llm.llm_engine.input_processor, llm.llm_engine.config.model.model
            prompts, params = requests_of(args, client_text(processor, args), processor)
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=True)
            seconds = time.perf_counter() - begin
    result = throughput_result(outputs, seconds, model)
    failed = [output.error for output in outputs if output.error is not None]
    print(table(result))
    for error in failed[:1]:
        print(f"Failed requests:          {len(failed)}, the first one: {error}")
    write_json(args.output_json, result)
    return 1 if failed else 0


def client_text(processor: Any, args: argparse.Namespace) -> "ClientText":
    """How prompts are made: with the engine's own tokenizer."""
    from jaxpaged.tools.bench.client_text import ClientText

    if not processor.has_tokenizer:
        raise UsageError("the prompts of datasets are text. Leave out --skip-tokenizer-init.")
    return ClientText(processor.tokenizer, processor.chat_templates, chat=args.backend == "vllm-chat")


def requests_of(
    args: argparse.Namespace, text: "ClientText", processor: Any
) -> tuple[list[dict[str, Any]], list["SamplingParams"]]:
    """The prompts of the dataset, and what is asked for each."""
    from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
    from jaxpaged.tools.bench.datasets import sample_requests

    requests = sample_requests(args, text)
    asked = {
        "n": args.n,
        "temperature": 1.0,
        "top_p": 1.0,
        "ignore_eos": True,
        "detokenize": not args.disable_detokenize,
    }
    kind = RequestOutputKind.FINAL_ONLY
    params = [SamplingParams(max_tokens=request.output_len, output_kind=kind, **asked) for request in requests]
    return [prompt_of(request, text, processor) for request in requests], params


def prompt_of(request: "BenchRequest", text: "ClientText", processor: Any) -> dict[str, Any]:
    """What the engine takes. A chat is rendered here, so that this is not measured."""
    prompt = request.prompt
    if text.chat:
        return processor.chat_prompt([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}


async def in_another_process(
    args: argparse.Namespace, options: Mapping[str, Any]
) -> tuple[float, list["RequestOutput"], str]:
    """(seconds, outputs, model) with an `AsyncLLM`."""
    from jaxpaged.entrypoints.batch_progress import BatchProgress
    from jaxpaged.entrypoints.cli.serve import open_async_engine
    from jaxpaged.entrypoints.terminal import ProgressLine

    line = ProgressLine()
    try:
        engine = open_async_engine(options, line.update, 300.0, 0)
    finally:
        line.close()
    try:
        await engine.wait_for_programs()
        prompts, params = requests_of(args, client_text(engine.input_processor, args), engine.input_processor)
        with BatchProgress(len(prompts), use_tqdm=True) as progress:

            async def one(number: int) -> "RequestOutput":
                outputs = [each async for each in engine.generate(prompts[number], params[number], str(number))]
                progress.advance(outputs[-1])
                return outputs[-1]

            begin = time.perf_counter()
            outputs = await asyncio.gather(*(one(number) for number in range(len(prompts))))
            return time.perf_counter() - begin, outputs, engine.config.model.model
    finally:
        engine.shutdown()


def throughput_result(outputs: Sequence["RequestOutput"], seconds: float, model: str) -> dict[str, Any]:
    """vLLM's fields, and the tokens of prompts and answers apart."""
    tokens_in = sum(len(output.prompt_token_ids) for output in outputs)
    tokens_out = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    return {
        "model_id": model,
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": tokens_in + tokens_out,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": (tokens_in + tokens_out) / seconds,
        "total_prompt_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "output_tokens_per_second": tokens_out / seconds,
    }


def table(result: Mapping[str, Any]) -> str:
    """vLLM's lines."""
    return (
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, {result['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {result['total_prompt_tokens']}\n"
        f"Total num output tokens:  {result['total_output_tokens']}"
    )
