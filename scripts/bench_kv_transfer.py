#!/usr/bin/env python
"""What keys and values besides the device bring and cost: first tokens behind prefixes from everywhere, and the rest.

    python scripts/bench_kv_transfer.py [--model FOLDER] [--lengths 64 512 2048 8192] [--repeats 3] [--redis auto]
        [--folder PATH] [--parts first saving restart] [--chart PNG]

first    a table of the milliseconds until the first token behind prefixes of some lengths: computed, found on the
         device, loaded from host memory, a disk and Redis, and handed over by another engine, which has to compute
         them; from which length on a tier is sooner than computing; and beside them what this machine needs at least:
         for the products of the model, and to copy as many bytes, read them from a file and ask a Redis for them
saving   tokens a second of 8 requests where what they compute is saved, against where nothing is, and the host's time
         in a step that saves and loads nothing
restart  the first answer of an engine that was started anew, with the folder that another one has left and without

`--redis auto` starts a server of its own, if it is installed. All of it is one run on one machine, medians, after one
that does not count: compare the ratios. Run beside nothing else. `bench_kv_tiers.py` measures pages and tiers alone.
"""

import argparse
import contextlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from bench_kv_tiers import leave_page_cache, rate

from jaxpaged import LLM, SamplingParams
from jaxpaged.kv_connector.base import KVConnectorOutput
from jaxpaged.kv_store.buffers import aligned_empty
from jaxpaged.kv_store.redis_tier import connect_redis
from jaxpaged.kv_store.tier import Lookup

CHUNK, BLOCK = 512, 32
OPTIONS = {"token_buckets": (8, CHUNK), "num_scheduler_steps": 1, "wait_for_programs": True, "block_size": BLOCK}
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
COMPUTED, FOUND, REMOTE = "computed", "found on the device", "handed over by another engine"
BEHIND = "of which transfer that computing does not hide"
Prompt = dict[str, list[int]]
Rows = dict[str, dict[int, float]]
"""Seconds by what they are of, and by the length of the prefix."""


def prompt_of(num_tokens: int, number: int) -> Prompt:
    """A prefix of so many token ids, with which no other prompt begins, and one more."""
    begin = [100 + number % 1900, 100 + number // 1900]
    return {"prompt_token_ids": [*begin, *(100 + 7 * i % 900 for i in range(num_tokens - 1))]}


def seconds_of(llm: LLM, prompt: Prompt, params: SamplingParams = FIRST) -> float:
    begin = time.perf_counter()
    llm.generate([prompt], params, use_tqdm=False)
    return time.perf_counter() - begin


def options_for(lengths: Sequence[int]) -> dict[str, Any]:
    """Of engines with room for two of the longest prompts, also where layers have windows."""
    longest = max(lengths) + 4 * BLOCK
    return {**OPTIONS, "max_model_len": longest, "max_num_seqs": 2, "num_gpu_blocks_override": 4 * longest // BLOCK}


# ---- first tokens ----------------------------------------------------------------------------------


class TieredEngine:
    """An engine with several tiers, which is made to load from one of them."""

    def __init__(self, llm: LLM):
        self.llm = llm
        core: Any = llm.llm_engine._core
        self._transfer, half = core.executor.worker.kv_transfer, core.transfers
        half.rates.pays, half.patience = (lambda sources: True), 300.0
        self._store, self._keys = self._transfer.connector.tiers, set[Any]()
        put = self._store.put
        self._store.put = lambda key, buffers: self._keys.add(key) or put(key, buffers)

    def keep(self, prompt: Prompt) -> None:
        """Compute a prompt, and wait until its pages are in all tiers. What was not saved, since too much was on its
        way, is computed again."""
        wanted, num_cached = (len(prompt["prompt_token_ids"]) - 1) // BLOCK * BLOCK, -1
        while num_cached < wanted:
            assert self.llm.reset_prefix_cache()
            (result,) = self.llm.generate([prompt], FIRST, use_tqdm=False)
            num_cached = result.num_cached_tokens
            while self._transfer.stats()["kv_offload_copies_under_way"]:
                time.sleep(0.01)
            assert self._store.flush(300.0), "the tiers are too slow"
        first, *others = self._store.tiers
        for tier in others:  # a full queue has dropped some
            for key in self._keys:
                if tier.lookup([key]) != [Lookup.HIT] and (page := first.get(key)) is not None:
                    tier.put(key, [page])

    def load(self, prompt: Prompt, number: int) -> float:
        """Seconds until the first token where tier `number` has the pages and those before it, from now on, do not."""
        tier, wanted = self._store.tiers[number], (len(prompt["prompt_token_ids"]) - 1) // BLOCK * BLOCK
        for _ in range(3):
            assert self._store.flush(300.0) and self.llm.reset_prefix_cache()
            for before in self._store.tiers[:number]:
                before.delete(self._keys)
            begin, hits = time.perf_counter(), tier.usage()[0].counters.hits
            (result,) = self.llm.generate([prompt], FIRST, use_tqdm=False)
            took, num_pages = time.perf_counter() - begin, tier.usage()[0].counters.hits - hits
            if result.num_cached_tokens == wanted and num_pages:
                return took
            print(f"{tier.name}: {num_pages} pages and {result.num_cached_tokens} of {wanted} tokens came; once more")
            time.sleep(31)  # a store that failed is left alone for so long
            self.keep(prompt)
        sys.exit(f"{tier.name} does not have what was stored. Is there room, and does the store answer?")


def handed_over(producer: LLM, consumer: LLM, prompt: Prompt) -> tuple[float, float]:
    """Seconds until the consumer's first token, and how many of them after the prompt was computed."""
    engine, ends = producer.llm_engine, list[float]()

    def follow(said: dict[str, Any]) -> None:
        params = msgspec.structs.replace(FIRST, extra_args={"kv_transfer_params": said})
        (result,) = consumer.generate([prompt], params, use_tqdm=False)
        assert result.num_cached_tokens > len(prompt["prompt_token_ids"]) - 2 * BLOCK, result.num_cached_tokens
        ends.append(time.perf_counter())

    begin, follower = time.perf_counter(), None
    lends = msgspec.structs.replace(FIRST, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    engine.add_request("prompt", prompt, lends)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.kv_transfer_params and follower is None:
                follower = threading.Thread(target=follow, args=(output.kv_transfer_params,))
                follower.start()
    computed = time.perf_counter()
    assert follower is not None, "nothing was lent"
    follower.join()
    return ends[0] - begin, ends[0] - computed


def first_tokens(model: str, lengths: Sequence[int], repeats: int, folder: str, redis: str | None) -> Rows:
    """Each way to the first token, and what this machine needs for it at least."""
    options, rows = options_for(lengths), Rows()
    names = ["host memory", "a disk", *(["Redis"] if redis else [])]
    with LLM(model, **options) as llm:
        for length in lengths:
            both = [[seconds_of(llm, prompt_of(length, number)) for _ in range(2)] for number in range(repeats + 1)]
            for name, each in zip((COMPUTED, FOUND), zip(*both[1:])):
                rows.setdefault(name, {})[length] = statistics.median(each)
        bounds = {"at least, for the products": bound_of_products(llm, lengths)}
    tiers = f"host=6G,disk={folder}/tier:12G" + (f",redis={redis}" if redis else "")
    with LLM(model, **options, kv_role="kv_consumer", kv_offload=tiers) as llm:
        engine = TieredEngine(llm)
        for length in lengths:
            for number in range(repeats + 1):
                engine.keep(prompt_of(length, number))
            for tier, name in enumerate(names):
                took = [engine.load(prompt_of(length, number), tier) for number in range(repeats + 1)]
                rows.setdefault(name, {})[length] = statistics.median(took[1:])
        with LLM(model, **options, kv_role="kv_producer") as producer:
            for length in lengths:
                prompts = [prompt_of(length, repeats + 1 + number) for number in range(repeats + 1)]
                both = [[*handed_over(producer, llm, prompt)] for prompt in prompts]
                for name, each in zip((REMOTE, BEHIND), zip(*both[1:])):
                    rows.setdefault(name, {})[length] = statistics.median(each)
        token_bytes = engine._transfer._copies.page_bytes(0) * engine._transfer._num_groups / BLOCK
    for name, speed in raw_speeds(folder, redis).items():
        bounds[f"at least, {name}"] = {length: length * token_bytes / speed for length in lengths}
    return rows | bounds


def bound_of_products(llm: LLM, lengths: Sequence[int]) -> dict[int, float]:
    """Seconds that the products of prompts take, if all were as fast as a large one. Attention comes on top."""

    def count(params: Any) -> tuple[int, Any]:
        leaves = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
        return sum(leaf.size for leaf in leaves if max(leaf.shape) < 16_000), leaves[0].dtype  # no table of tokens

    ((num_params, dtype),) = llm.apply_model(count)
    left, right = jnp.ones((CHUNK, 2048), dtype), jnp.ones((2048, 4096), dtype)
    multiply = jax.jit(jnp.matmul)
    flops = 1e9 * rate(2 * left.size * right.shape[1], lambda: multiply(left, right).block_until_ready())
    return {length: 2 * num_params * length / flops for length in lengths}


def raw_speeds(folder: str, redis: str | None, num_bytes: int = 64 << 20) -> dict[str, float]:
    """Bytes a second of a plain copy, of reading a file that no page cache holds, and of asking a Redis."""
    source, target = aligned_empty(num_bytes), aligned_empty(num_bytes)
    source[:] = 1
    speeds = {"to copy the bytes": 1e9 * rate(num_bytes, lambda: np.copyto(target, source))}
    path = Path(folder) / "raw"
    path.write_bytes(source)

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            assert file.readinto(target) == num_bytes
            leave_page_cache(file.fileno())

    read()
    speeds["to read them from a file"] = 1e9 * rate(num_bytes, read)
    path.unlink()
    if redis:
        client, *_ = connect_redis(redis, (None, None), 10.0)
        part = bytes(1 << 20)
        client.set("raw", part)
        asked = rate(len(part), lambda: client.get("raw"))
        speeds["to ask a Redis for them"] = 1e9 * asked
        client.delete("raw")
    return speeds


def pays_from(computed: dict[int, float], other: dict[int, float]) -> str:
    """From which length on it is sooner than to compute, between two that were measured."""
    gains = [(length, computed[length] - other[length]) for length in sorted(computed)]
    first = next((i for i, (_, gain) in enumerate(gains) if gain > 0), None)
    if first is None:
        return f"not up to {gains[-1][0]:,}"
    if first == 0:
        return f"{gains[0][0]:,} or less"
    (before, lacking), (after, gain) = gains[first - 1 : first + 1]
    return f"{before + (after - before) * -lacking / (gain - lacking):,.0f}"


def table_of(rows: Rows) -> str:
    lengths = sorted(rows[COMPUTED])
    lines = [
        "| ms until the first token behind | " + " | ".join(f"{each:,} tokens" for each in lengths) + " | pays from |"
    ]
    lines.append("|---" * (len(lengths) + 2) + "|")
    for name, took in rows.items():
        is_way = name not in (COMPUTED, REMOTE, BEHIND) and not name.startswith("at least")
        cells = [f"{1000 * took[length]:.1f}" for length in lengths]
        lines.append(f"| {name} | {' | '.join(cells)} | {pays_from(rows[COMPUTED], took) if is_way else ''} |")
    return "\n".join(lines)


def draw(rows: Rows, path: Path) -> None:
    """Seconds over lengths, both by powers. Raises ImportError without matplotlib (extra `plots`)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, took in rows.items():
        if name != BEHIND:
            is_bound = name.startswith("at least")
            axis.loglog(
                list(took),
                [1000 * each for each in took.values()],
                label=name,
                linewidth=1 if is_bound else 2,
                linestyle=":" if is_bound else "-",
                marker=None if is_bound else "o",
            )
    axis.set_xticks(list(rows[COMPUTED]), [f"{each:,}" for each in rows[COMPUTED]])
    axis.set_xlabel("tokens of the prefix")
    axis.set_ylabel("ms until the first token")
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=130)


# ---- saving, and restarts --------------------------------------------------------------------------


def decode_rate(llm: LLM, first_number: int) -> float:
    """Tokens a second of 8 requests."""
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    prompts = [prompt_of(16, first_number + number) for number in range(8)]
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return 8 * 128 / (time.perf_counter() - begin)


def idle_microseconds(llm: LLM, count: int = 20_000) -> float:
    """CPU time of a step's calls to what saves and loads, where it has nothing to do."""
    core: Any = llm.llm_engine._core
    [record], _ = core.step_log.read(most=1)
    scheduler, nothing = core._scheduler, KVConnectorOutput()
    assert scheduler.build_connector_meta() is None
    begin = time.thread_time()
    for _ in range(count):
        scheduler.build_connector_meta()
        scheduler.update_connector_output(nothing)
        core.transfers.observe(record)
    return 1e6 * (time.thread_time() - begin) / count


def show_saving(model: str, repeats: int, folder: str) -> None:
    """Engines in turns, since a machine's speed changes with time."""
    tiers = {"nothing": None, "host memory": "host=2G", "a disk": f"disk={folder}/saving:4G"}
    options = {**OPTIONS, "max_model_len": 1024, "max_num_seqs": 8}
    with contextlib.ExitStack() as stack:
        engines = {name: stack.enter_context(LLM(model, kv_offload=tier, **options)) for name, tier in tiers.items()}
        turns = [{name: decode_rate(llm, 8 * i) for name, llm in engines.items()} for i in range(repeats + 1)][1:]
        for name, llm in engines.items():
            best, ratio = max(turn[name] for turn in turns), [turn[name] / turn["nothing"] for turn in turns]
            print(
                f"saving to {name}: {best:,.0f} tokens/s of 8 requests, {statistics.median(ratio):.3f} of those "
                f"without; {idle_microseconds(llm):.1f} us of the host in a step that saves and loads nothing"
            )


def show_restart(model: str, length: int, folder: str) -> None:
    tier = f"disk={folder}/restart:4G"
    options, took = options_for([length]), {}
    with LLM(model, kv_offload=tier, **options) as llm:
        TieredEngine(llm).keep(prompt_of(length, 0))
    for name, offload in (("without", None), ("with", tier)):
        with LLM(model, kv_offload=offload, **options) as llm:
            if offload is not None:
                llm.llm_engine._core.executor.worker.kv_transfer.connector.tiers.tiers[0].wait_ready(60)  # type: ignore[attr-defined]
            took[name] = 1000 * seconds_of(llm, prompt_of(length, 0))
    ratio = took["without"] / took["with"]
    print(
        f"the first answer after a restart, behind {length:,} tokens: {took['without']:.1f} ms, and {took['with']:.1f} "
        f"with the folder of before, {ratio:.1f} times sooner"
    )


# ---- the machine -----------------------------------------------------------------------------------


@contextlib.contextmanager
def redis_server(wanted: str | None) -> Iterator[str | None]:
    """The address of a server: one of our own for "auto", None where that is not installed."""
    if wanted != "auto":
        yield wanted
        return
    program = shutil.which("redis-server")
    if program is None:
        print("Redis is left out: redis-server is not installed")
        yield None
        return
    with socket.socket() as taken, tempfile.TemporaryDirectory() as folder:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.close()
        command = [program, "--port", str(port), "--save", "", "--bind", "127.0.0.1", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            for _ in range(500):
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                time.sleep(0.02)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a folder or name; the embedded model unless it is given")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 2048], help="tokens of the prefixes")
    parser.add_argument("--repeats", type=int, default=3, help="measurements, of which the median is shown")
    parser.add_argument("--redis", metavar="URL", help="a server to measure too, or auto: a new one")
    parser.add_argument("--folder", type=Path, help="where the disk's pages go; a temporary folder unless it is given")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--chart", type=Path, metavar="PNG", help="draw the first tokens there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, redis_server(args.redis) as redis:
        if "first" in args.parts:
            rows = first_tokens(args.model, sorted(args.lengths), args.repeats, folder, redis)
            print(table_of(rows), flush=True)
            if args.chart:
                draw(rows, args.chart)
        if "saving" in args.parts:
            show_saving(args.model, args.repeats, folder)
        if "restart" in args.parts:
            show_restart(args.model, min(max(args.lengths), 2048), folder)


PARTS = ["first", "saving", "restart"]

if __name__ == "__main__":
    main()
