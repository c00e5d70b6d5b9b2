"""What rows kept for short requests cost those that stream, and how long a request for one token waits beside them.

    python scripts/bench_short_requests.py [--streams 200] [--rows 0 1 2] [--rounds 3] [--seconds 15]

The embedded model decodes for `--streams` requests all the time, each of 64 to 192 tokens and begun anew when it ends,
in as many rows as the engine has by default. Ten times in a second of the engine's work somebody asks for one token.
The engines with each number of rows run in turns, so that a busy machine is as bad for each; ratios are to the first.
"""

import argparse
import random
import statistics
import time
from dataclasses import dataclass, field

from jaxpaged import LLM, SamplingParams
from jaxpaged.sampling_params import RequestOutputKind

SECONDS_BETWEEN = 0.1
PROMPT = 24
"""Tokens of a stream's prompt; a short one has half as many."""


@dataclass
class Result:
    """Of one number of rows, over all rounds: tokens a second of the streams, and seconds that short requests took."""

    rates: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


class Crowd:
    """Streams beside which short requests come."""

    def __init__(self, rows: int, args: argparse.Namespace):
        llm = LLM(num_short_request_rows=rows, max_num_seqs=args.max_num_seqs, wait_for_programs=True)
        self.engine = llm.llm_engine
        self._draw = random.Random(rows)
        self._num_begun = 0
        for number in range(args.streams):
            self._begin(self._draw.randint(8, 192) if number < 64 else self._draw.randint(64, 192))

    def _begin(self, num_tokens: int, kind: str = "stream", length: int = PROMPT) -> str:
        self._num_begun += 1
        name = f"{kind}-{self._num_begun}"
        prompt = {"prompt_token_ids": [self._draw.randrange(300, 900) for _ in range(length)]}
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        self.engine.add_request(name, prompt, params)
        return name

    def run(self, seconds: float, result: Result) -> None:
        begin = now = time.perf_counter()
        num_tokens, asked, next_question = 0, dict[str, float](), begin
        while now < begin + seconds:
            if now >= next_question:
                asked[self._begin(1, "short", PROMPT // 2)] = now
                next_question += SECONDS_BETWEEN
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                num_tokens += sum(len(each.token_ids) for each in output.outputs)
                if output.finished and output.request_id in asked:
                    result.waits.append(now - asked.pop(output.request_id))
                elif output.finished and output.request_id.startswith("stream"):
                    self._begin(self._draw.randint(64, 192))
        result.waits += [now - since for since in asked.values()]  # at least
        self.engine.abort_request(list(asked))
        result.rates.append(num_tokens / (now - begin))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    crowds = {rows: Crowd(rows, args) for rows in args.rows}
    results = {rows: Result() for rows in args.rows}
    for crowd in crowds.values():
        crowd.run(2.0, Result())
    for _ in range(args.rounds):
        for rows, crowd in crowds.items():
            crowd.run(args.seconds / args.rounds, results[rows])
    print("| rows kept | tokens/s of streams | one token: median s | 95 % s | longest s |")
    print("|---|---|---|---|---|")
    first = statistics.median(results[args.rows[0]].rates)
    for rows, result in results.items():
        rate, waits = statistics.median(result.rates), sorted(result.waits)
        median, most = statistics.median(waits), waits[int(0.95 * (len(waits) - 1))]
        print(f"| {rows} | {rate:,.0f} ({rate / first:.3f}) | {median:.2f} | {most:.2f} | {waits[-1]:.2f} |")


if __name__ == "__main__":
    main()
