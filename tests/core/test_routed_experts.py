"""`RoutedExperts`: what steps say of the tokens they computed, put together for requests."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxpaged.core.routed_experts import RoutedExperts
from jaxpaged.kv_cache_spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from jaxpaged.messages import EngineCoreOutput, ModelRunnerOutput, NewRequestData, SchedulerOutput
from jaxpaged.sampling_params import SamplingParams

BLOCK = 4


def book(*windows, keeps_blocks=True):
    groups = tuple(KVCacheGroup(AttentionSpec(BLOCK, 1, 8, 2, window=each), (i,)) for i, each in enumerate(windows))
    return RoutedExperts(KVCacheConfig((9,), groups), 1, keeps_blocks)


def request(start=0):
    return SimpleNamespace(routed=None, sampling_params=SamplingParams(routed_experts_prompt_start=start))


def new(name, num_computed, *block_ids):
    return NewRequestData(name, [], 8, num_computed, tuple(map(list, block_ids)), SamplingParams())


def lines(*tokens):
    """Each token went to two experts of one layer, which tell what token it is."""
    return np.array(tokens, np.int16)[:, None, None] + np.array([0, 100], np.int16)


def step(book, requests, entries, tokens, *, drawn, new_requests=()):
    """One step of (name, tokens, most drawn, new blocks) -> what is told of each request."""
    names, counts, most, block_ids = zip(*entries)
    scheduled = SchedulerOutput(1, list(new_requests), [], list(names), list(counts), [], list(most), list(block_ids))
    results = [EngineCoreOutput(name, [1] * count) for name, count in drawn.items()]
    output = ModelRunnerOutput(1, list(drawn), [[1] * count for count in drawn.values()], routed_experts=lines(*tokens))
    book.take(requests, scheduled, output, results)
    return [
        None if each.routed_experts is None else np.concatenate(each.routed_experts)[:, 0, 0].tolist()
        for each in results
    ]


def test_chunks_wait_for_the_first_token_and_refused_drafts_mean_nothing():
    own, requests = book(None), {"a": request(), "b": request(start=2)}
    begun = [new("a", 0, [1, 2]), new("b", 0, [3])]
    entries = [("a", 5, 0, None), ("b", 3, 1, None)]
    assert step(own, requests, entries, range(10, 18), drawn={"b": 1}, new_requests=begun) == [[17]]
    entries = [("b", 4, 4, ([4],)), ("a", 3, 1, None)]  # of three drafts one was right
    told = step(own, requests, entries, [20, 21, 99, 99, 15, 16, 17], drawn={"b": 2, "a": 1})
    assert told == [[20, 21], [10, 11, 12, 13, 14, 15, 16, 17]]
    assert step(own, requests, [("b", 1, 1, None)], [22], drawn={"b": 1}) == [[22]]


def test_what_the_cache_has_comes_with_the_experts_it_was_computed_with():
    own, requests = book(5, None), {"a": request(), "b": request()}
    step(own, requests, [("a", 8, 1, None)], range(8), drawn={"a": 1}, new_requests=[new("a", 0, [1, 2], [3, 4])])
    found = new("b", 4, [0, 5], [3, 6])
    told = step(own, requests, [("b", 2, 1, None)], [44, 45], drawn={"b": 1}, new_requests=[found])
    assert told == [[0, 1, 2, 3, 44, 45]]


@pytest.mark.parametrize("keeps_blocks", [True, False])
def test_what_nobody_knows_any_more_is_marked(keeps_blocks):
    own, requests = book(5, keeps_blocks=keeps_blocks), {"b": request()}
    step(own, requests, [("b", 1, 1, None)], [48], drawn={"b": 1}, new_requests=[new("b", 8, [0, 0, 5])])
    assert requests["b"].routed.num_known == 9 and requests["b"].routed.untold == []
    requests["b"].routed = None
    told = step(own, requests, [("b", 1, 1, None)], [48], drawn={"b": 1}, new_requests=[new("b", 8, [0, 0, 5])])
    assert told == [[-1] * 8 + [48]]


def test_what_is_computed_again_stays_as_it_was():
    own, requests = book(None), {"a": request()}
    step(own, requests, [("a", 3, 1, None)], [0, 1, 2], drawn={"a": 1}, new_requests=[new("a", 0, [1])])
    again = new("a", 0, [2, 3])
    assert step(own, requests, [("a", 5, 1, None)], [60, 61, 62, 3, 4], drawn={"a": 1}, new_requests=[again]) == [
        [3, 4]
    ]
    assert step(own, requests, [("a", 1, 1, None)], [5], drawn={"a": 1}) == [[5]]
