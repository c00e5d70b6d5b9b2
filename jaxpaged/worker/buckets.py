"""Which padded sizes exist.

A program has fixed shapes, so a step is padded to the next size that has a program. Forward programs grow along
tokens only: a step of T tokens has at most T requests, so its row dimension is `min(T, max_num_seqs)`. Sampling
programs grow along the rows that sample. The two families add up instead of multiplying.
"""

# The smallest bucket. A product with a single row is 6-12 times slower on XLA:CPU than one with two, and up to
# eight rows cost no more than two there; on accelerators a matmul tile has at least eight rows.
MIN_BUCKET = 8


def doubling_buckets(largest: int) -> tuple[int, ...]:
    """8, 16, 32, ... and `largest` itself; at least `MIN_BUCKET`."""
    sizes = []
    size = MIN_BUCKET
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, max(largest, MIN_BUCKET))
