#!/usr/bin/env python
"""What pages of 8 bits save and what they cost: bytes, errors of keys and values, and text that goes on behind them.

    python scripts/bench_kv_pages.py [--questions 100] [--stories 50] [--tokens 1000]

The embedded model is asked for code words in texts of so many tokens, and goes on with texts of such length for 64
tokens, greedily; first everything is computed, then every beginning is loaded from host memory, in exact pages and in
pages of 8 bits. Errors are root mean squares over all keys or values of all layers, in parts of the exact ones'.
"""

import argparse
import random
import time
from dataclasses import dataclass

import numpy as np
from demo_model import tasks
from demo_model.stories import filler_sentences

from jaxpaged import LLM, SamplingParams
from jaxpaged.kv_store.page import PageKey, decode, scales_of

OPTIONS = {"max_model_len": 4096, "max_num_seqs": 8, "token_buckets": (8, 512), "num_gpu_blocks_override": 800}
CHARACTERS = 3.4
"""Of a token."""


@dataclass
class Outcome:
    """What an engine said behind beginnings that were loaded, and the pages that it kept."""

    computed: list[str]
    loaded: list[str]
    pages: dict[PageKey, np.ndarray]
    num_bytes: int

    @property
    def num_equal(self) -> int:
        return sum(a == b for a, b in zip(self.computed, self.loaded))


def outcome(form: str, questions: list[str], stories: list[str]) -> Outcome:
    """Of pages of one form."""
    with LLM(kv_offload=f"host=4G,pages={form}", **OPTIONS) as llm:
        transfer = llm.llm_engine._core.executor.worker.kv_transfer
        llm.llm_engine._core.transfers.rates.pays = lambda sources: True
        computed = texts(llm, questions, stories)
        while transfer.stats()["kv_offload_tier_host"]["pages"] < transfer.num_saved or transfer._under_way:
            time.sleep(0.1)
        assert llm.reset_prefix_cache()
        loaded, stats = texts(llm, questions, stories), transfer.stats()
        assert stats["kv_offload_pages_loaded"] and not stats["kv_offload_pages_dropped"], stats
        pages = {
            key: values_of(transfer.connector.tiers.get(key), key) for key in transfer.connector.tiers.tiers[0]._pages
        }
        return Outcome(computed, loaded, pages, stats["kv_offload_tier_host"]["bytes"])


def texts(llm: LLM, questions: list[str], stories: list[str]) -> list[str]:
    """One request at a time, so that the prompts' pages are there and no load is in another's way."""
    asked = [[{"role": "user", "content": question}] for question in questions]
    answer, story = SamplingParams(temperature=0.0, max_tokens=24), SamplingParams(temperature=0.0, max_tokens=64)
    said = [llm.chat([each], answer, use_tqdm=False)[0] for each in asked]
    said += [llm.generate([each], story, use_tqdm=False)[0] for each in stories]
    return [each.outputs[0].text for each in said]


def values_of(buffer: np.ndarray, key: PageKey) -> np.ndarray:
    header, values = decode(buffer, expect_namespace=None, key=key)
    scales = scales_of(buffer, header)
    return values.astype(np.float32) * (1.0 if scales is None else scales[..., None])


def errors(exact: Outcome, other: Outcome) -> list[float]:
    """Of keys, and of values."""
    squares = np.zeros((2, 2))
    for key in exact.pages.keys() & other.pages.keys():
        a, b = exact.pages[key], other.pages[key]
        squares += [[np.square(b - a)[:, i].sum(), np.square(a)[:, i].sum()] for i in (0, 1)]
    return list(np.sqrt(squares[:, 0] / squares[:, 1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=100, help="for code words")
    parser.add_argument("--stories", type=int, default=50, help="texts to go on with")
    parser.add_argument("--tokens", type=int, default=1000, help="of each text, about")
    args = parser.parse_args()
    draw, characters = random.Random(0), int(args.tokens * CHARACTERS)
    questions, answers = zip(*(tasks.draw_code_word(draw, characters, test=True) for _ in range(args.questions)))
    stories = [" ".join(filler_sentences(draw, characters)) for _ in range(args.stories)]
    exact: Outcome | None = None
    for form in ("exact", "int8", "fp8"):
        found = outcome(form, list(questions), stories)
        exact = exact or found
        right = sum(text.strip() == answer for text, answer in zip(found.loaded, answers))
        off = [100 * each for each in errors(exact, found)]
        print(
            f"{form}: {found.num_bytes / exact.num_bytes:.2f} of the bytes; keys off by {off[0]:.2f} %, values by "
            f"{off[1]:.2f} %; {found.num_equal} of {len(found.loaded)} texts as when computed; "
            f"{right} of {len(answers)} code words right"
        )


if __name__ == "__main__":
    main()
