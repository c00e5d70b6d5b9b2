#!/usr/bin/env python
"""How fast pages are made, checked, kept and found, and blocks copied off the device and to it, beside a plain copy.

    python scripts/bench_kv_tiers.py [--page-mib 2] [--pages 64] [--folder PATH] [--redis redis://HOST:PORT]

GB/s of one thread, medians of one run: encoding and decoding a page, with and without a secret, and a plain copy of it,
all by processor time, so that other work disturbs little; put and get in host memory, on a disk (its page cache is
warm, as behind a restart of an engine), in Redis where one is named; microseconds of a look-up; files as large as a
page through the page cache, through it without leaving anything there, and around it; and gather and scatter of the
embedded model's blocks, to host memory and from it, beside a plain copy of as many bytes. Compare the ratios.
"""

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np

from jaxpaged import LLM
from jaxpaged.kv_store.buffers import aligned_empty, joined
from jaxpaged.kv_store.disk import DiskTier
from jaxpaged.kv_store.host import HostTier
from jaxpaged.kv_store.page import PageHeader, PageKey, decode, encode, namespace
from jaxpaged.kv_store.redis_tier import RedisTier
from jaxpaged.kv_store.tier import Lookup, Tier

SPACE, SECRET = namespace(bench="tiers"), b"sixteen letters."
REPEATS = 7


def rate(num_bytes: int, call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """GB/s of a call that moves so many bytes; the first one does not count."""
    seconds = []
    for _ in range(REPEATS + 1):
        begin = clock()
        call()
        seconds.append(clock() - begin)
    return num_bytes / statistics.median(seconds[1:]) / 1e9


def pages_of(page_bytes: int, count: int) -> dict[PageKey, list]:
    """Pages as an engine puts them: 32 tokens of 8 heads of 128 numbers in as many layers as are asked for."""
    layer = (2, 32, 8, 128)
    layers = max(page_bytes // (2 * int(np.prod(layer))), 1)
    values = np.random.default_rng(0).integers(0, 255, (layers, *layer, 2), np.uint8).view(np.float16)[..., 0]
    keys = [PageKey(i.to_bytes(32, "big"), 0) for i in range(count)]
    return {key: encode(PageHeader(SPACE, key, None, tuple(range(32))), values) for key in keys}


def show_pages(pages: dict[PageKey, list]) -> int:
    """Encoding, decoding, and copying of one. Its bytes."""
    key, buffers = next(iter(pages.items()))
    whole = joined(buffers)
    header, values = decode(whole, expect_namespace=SPACE, key=key)
    for name, secret in (("", None), (" with a secret", SECRET)):
        page = joined(encode(header, values, secret))
        coded = partial(encode, header, values, secret)
        encoded = rate(whole.nbytes, coded, time.thread_time)
        checked = partial(decode, page, expect_namespace=SPACE, key=key, secret=secret)
        decoded = rate(whole.nbytes, checked, time.thread_time)
        print(f"a page of {whole.nbytes} bytes{name}: encoded {encoded:.1f} GB/s, decoded {decoded:.1f}")
    target = aligned_empty(whole.nbytes)
    print(f"a page, copied: {rate(whole.nbytes, lambda: np.copyto(target, whole), time.thread_time):.1f} GB/s")
    return whole.nbytes


def show_tier(tier: Tier, pages: dict[PageKey, list], page_bytes: int) -> None:
    """Put, look-up and get of all pages, which are then removed."""
    keys, total = list(pages), page_bytes * len(pages)

    def put() -> None:
        tier.delete(keys)
        for key, buffers in pages.items():
            assert tier.put(key, buffers), "it has no room"

    stored = rate(total, put)
    while Lookup.PENDING in tier.lookup(keys):  # a store elsewhere is asked in the background
        time.sleep(0.001)
    looked = len(keys) / rate(len(keys), lambda: tier.lookup(keys)) / 1e9
    got = rate(total, lambda: [tier.get(key) for key in keys])
    print(f"{tier.name}: put {stored:.1f} GB/s, get {got:.1f}, a look-up {1e6 * looked / len(keys):.2f} us a key")
    tier.delete(keys)
    tier.close()


def leave_page_cache(file: int) -> None:
    """Have nothing of a file left there, which may have been written just now."""
    os.fdatasync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def is_cached(path: Path) -> bool:
    """Whether the page cache has the beginning of a file."""
    with open(path, "rb", buffering=0) as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except OSError:  # it is not, or the file system has no disk
            return False


def show_files(folder: Path, num_bytes: int, count: int) -> None:
    """Files of `num_bytes`, whole blocks of a disk, in each way: how fast, and how many are in the page cache then."""
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    source, target = aligned_empty(size, mmap.PAGESIZE), aligned_empty(size, mmap.PAGESIZE)
    source[:] = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    paths, total = [folder / f"{number}.raw" for number in range(count)], size * count

    def every(flags: int, *acts: Callable[[int], object]) -> float:
        """GB/s of doing this to all files."""
        begin = time.perf_counter()
        for path in paths:
            file = os.open(path, flags, 0o666)
            for act in acts:
                act(file)
            os.close(file)
        return total / (time.perf_counter() - begin) / 1e9

    write, read = (lambda file: os.write(file, source)), (lambda file: os.readv(file, [target]))
    new, direct = os.O_WRONLY | os.O_CREAT | os.O_TRUNC, getattr(os, "O_DIRECT", 0)

    def show(name: str, flags: int, acts: Sequence[Callable[[int], object]]) -> None:
        took: dict[str, list[float]] = {}
        for _ in range(REPEATS):
            begin = time.perf_counter()
            took.setdefault("written", []).append(every(new | flags, write, *acts))
            num_cached = sum(map(is_cached, paths))
            every(os.O_RDONLY, leave_page_cache)
            took.setdefault("written and on the disk", []).append(total / (time.perf_counter() - begin) / 1e9)
            took.setdefault("read from the disk", []).append(every(os.O_RDONLY | flags, read, *acts))
            took.setdefault("read again", []).append(every(os.O_RDONLY | flags, read, *acts))
        shown = ", ".join(f"{what} {statistics.median(each):.2f} GB/s" for what, each in took.items())
        print(
            f"files {name}: {shown}; {num_cached} of {count} were in the page cache when they were written", flush=True
        )

    show("through the page cache", 0, [])
    show("through it, leaving nothing", 0, [leave_page_cache])
    try:
        show("around it", direct, [])
    except OSError as error:
        print(f"files around it: {error.strerror}")
    for path in paths:
        path.unlink()


def show_copies() -> None:
    """Gather and scatter of the embedded model's blocks, as many as one copy has at most."""
    with LLM(max_model_len=4096, token_buckets=(8, 512), kv_offload="host=64M", num_scheduler_steps=1) as llm:
        copies = llm.llm_engine._core.executor.worker.kv_transfer._copies
        pages = copies.empty(0, copies.most(0))
        cut, num_bytes = copies._piece_sizes[0], sum(array.nbytes for array in pages)
        ids = list(range(1, copies.most(0) * cut.num_blocks + 1))

        def scatter() -> None:
            copies.scatter(0, ids, pages)
            jax.block_until_ready(copies._device.state.kv)

        gathered = rate(num_bytes, lambda: [*map(np.asarray, copies.gather(0, ids))])
        scattered = rate(num_bytes, scatter)
        source, target = aligned_empty(num_bytes), aligned_empty(num_bytes)
        plain = rate(num_bytes, lambda: np.copyto(target, source))
        print(
            f"blocks of {num_bytes} bytes in all: gathered {gathered:.1f} GB/s, scattered {scattered:.1f}, and a plain "
            f"copy of as many {plain:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-mib", type=float, default=2.0, help="MiB of a page")
    parser.add_argument("--pages", type=int, default=64, help="how many")
    parser.add_argument("--folder", type=Path, help="where the disk's pages go; a temporary folder unless it is given")
    parser.add_argument("--redis", metavar="URL", help="a server to measure too")
    args = parser.parse_args()
    pages = pages_of(int(args.page_mib * (1 << 20)), args.pages)
    page_bytes = show_pages(pages)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        room = 2 * page_bytes * len(pages)
        show_tier(HostTier(room), pages, page_bytes)
        show_tier(DiskTier(folder, room, SPACE), pages, page_bytes)
        show_files(Path(folder), page_bytes, len(pages))
    if args.redis is not None:
        show_tier(RedisTier(args.redis, SPACE), pages, page_bytes)
    show_copies()


if __name__ == "__main__":
    main()
