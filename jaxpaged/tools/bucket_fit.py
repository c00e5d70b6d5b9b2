"""Which token buckets fit a traffic: the set of N sizes that pads observed steps least.

Why the answer is exact. A step of t tokens runs in the smallest bucket of at least t, so with buckets b1 < b2 < ...
the steps in (b(i-1), b(i)] each cost b(i) tokens, and the padding is the sum of b - t over all steps.

1. Only sizes that occur need be considered: lowering a bucket to the largest step size that it serves pads these
   steps less and moves no step to another bucket. The largest bucket stays, since a step of that size may come.
2. For sorted candidates c1 < ... < cm let best(n, j) be the least padding of all steps of at most c(j), with n buckets
   of which c(j) is the largest. The bucket below c(j) is some c(i), i < j, and how the steps up to c(i) are served
   does not depend on what comes above. So best(n, j) = min over i of best(n - 1, i) + cost(i, j), where cost(i, j) is
   what the steps in (c(i), c(j)] are padded with in bucket c(j).

With sums over the sorted sizes a cost takes constant time: O(N m^2) in all. When buckets must be multiples of a number,
the candidates are the sizes rounded up to it, and the same holds among such sets.

This module knows step sizes and buckets, neither logs nor engines.
"""

import bisect
from collections.abc import Mapping, Sequence

import numpy as np


def fit_buckets(steps: Mapping[int, int], num_buckets: int, largest: int, multiple_of: int = 1) -> tuple[int, ...]:
    """At most `num_buckets` sizes with the least total padding, `largest` among them; sorted.

    `steps` is how many steps there were of each size, at most `largest` tokens. All sizes but `largest` are multiples
    of `multiple_of`. Fewer sizes are returned when more would save nothing.
    """
    assert num_buckets >= 1 and all(0 < size <= largest for size in steps), f"{num_buckets} buckets, steps {steps}"
    sizes = sorted(steps)
    candidates = sorted({min(-(-size // multiple_of) * multiple_of, largest) for size in sizes} | {largest})
    # Of the steps up to each candidate, index 0 being "none": how many there are, and how many tokens they have.
    steps_up_to, tokens_up_to = prefix_sums(steps, sizes, candidates)
    bucket_of = np.array([0, *candidates], np.int64)
    best = np.full(len(bucket_of), np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(min(num_buckets, len(candidates))):
        best, choice = add_bucket(best, bucket_of, steps_up_to, tokens_up_to)
        choices.append(choice)
    return trace_back(choices, bucket_of)


def prefix_sums(
    steps: Mapping[int, int], sizes: Sequence[int], candidates: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Number of steps, and of their tokens, of at most each candidate; 0 in front."""
    counts = np.cumsum([0, *(steps[size] for size in sizes)])
    tokens = np.cumsum([0, *(size * steps[size] for size in sizes)])
    places = [0, *(bisect.bisect_right(sizes, candidate) for candidate in candidates)]
    return counts[places], tokens[places]


def add_bucket(
    best: np.ndarray, bucket_of: np.ndarray, steps_up_to: np.ndarray, tokens_up_to: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One bucket more: least padding per largest bucket j, and which i lies below it. A bucket may also be saved."""
    better, choice = best.copy(), np.arange(len(best))
    for j in range(1, len(best)):
        padding = bucket_of[j] * (steps_up_to[j] - steps_up_to[:j]) - (tokens_up_to[j] - tokens_up_to[:j])
        totals = best[:j] + padding
        i = int(np.argmin(totals))
        if totals[i] < better[j]:
            better[j], choice[j] = totals[i], i
    return better, choice


def trace_back(choices: Sequence[np.ndarray], bucket_of: np.ndarray) -> tuple[int, ...]:
    """The sizes behind the best sum that ends with the largest bucket."""
    j, chosen = len(bucket_of) - 1, []
    for choice in reversed(choices):
        if choice[j] != j:
            chosen.append(int(bucket_of[j]))
            j = int(choice[j])
    return tuple(reversed(chosen))


def padding_of(steps: Mapping[int, int], buckets: Sequence[int]) -> int:
    """Tokens of padding when every step runs in the smallest bucket that it fits. `buckets` are sorted."""
    return sum(count * (buckets[bisect.bisect_left(buckets, size)] - size) for size, count in steps.items())
