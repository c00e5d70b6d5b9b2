"""Which padded sizes exist.

A program has fixed shapes, so a step is padded to the next size that has a program. Forward programs grow along
tokens only: a step of T tokens has at most T requests, so its row dimension is `min(T, max_num_seqs)`. Sampling
programs grow along the rows that sample. The two families add up instead of multiplying.
"""

from itertools import pairwise

# The smallest of the doubling sizes: on accelerators a matmul tile has at least eight rows, and so have XLA:CPU's.
MIN_BUCKET = 8

# A CPU has smaller sizes too, since rows are work there: eight take 1.3 times as long as two (bench_products.py).
# XLA's products of one row are 4-12 times slower than those of two, so with these there is but a size for a single
# request, of two. Where products of few rows are kernels of our own, one row takes 0.89 of the step of two (4 and 8
# bits, a 110M Llama), and their products two rows 0.5 to 0.6 and four 0.7 of the time of eight.
SINGLE_REQUEST, FEW_ROWS = (2,), (1, 2, 4)


def doubling_buckets(largest: int, platform: str, kernels: bool = False) -> tuple[int, ...]:
    """8, 16, 32, ... and `largest` itself; at least `MIN_BUCKET`. On a CPU with smaller ones before them; `kernels`:
    they multiply a single row."""
    sizes = list(FEW_ROWS if kernels else SINGLE_REQUEST) if platform == "cpu" else []
    size = MIN_BUCKET
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, max(largest, MIN_BUCKET))


def default_token_buckets(largest: int, platform: str, kernels: bool = False) -> tuple[int, ...]:
    """The doubling sizes, and from 128 tokens on also those half way between two of them.

    `jaxpaged buckets fit` on the steps of scripts/bench_offline.py's workloads proposes such sizes: with two more
    programs for 512 tokens, 6.5 % of what is computed is padding instead of 10.5.
    """
    sizes = doubling_buckets(largest, platform, kernels)
    between = (low + low // 2 for low, high in pairwise(sizes) if low >= 128 and high == 2 * low)
    return tuple(sorted((*sizes, *between)))
