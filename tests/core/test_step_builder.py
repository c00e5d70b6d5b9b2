"""A step keeps the scheduled tokens of every request when others are taken out of it again."""

from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.rank import ScheduledTokens, StepBuilder
from jaxpaged.core.request import Request
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.sampling_params import SamplingParams


def request(number):
    return Request(EngineCoreRequest(str(number), [1], SamplingParams(seed=0, max_tokens=9), 0.0), 10, number, 1)


@given(st.lists(st.sampled_from([None, 1, 5]), max_size=6), st.lists(st.integers(0, 7), max_size=4))
def test_shares_stay_with_their_requests_and_tokens_come_back(tokens, discarded):
    step, expected = StepBuilder(100, 1), {}
    requests = [request(i) for i in range(8)]
    for each, num_tokens in zip(requests, tokens):
        if num_tokens is None:  # it decodes one token in a slot that it has
            step.requests.append(each)
        else:
            step.add(each, ScheduledTokens(num_tokens, 1, None))
        expected[each] = num_tokens
    for number in discarded:
        step.discard(requests[number])
        expected.pop(requests[number], None)
    assert step.requests == list(expected)
    assert {step.requests[i]: scheduled.num_tokens for i, scheduled in step.scheduled.items()} == {
        each: num_tokens for each, num_tokens in expected.items() if num_tokens is not None
    }
    assert step.budget == 100 - sum(num_tokens or 1 for num_tokens in expected.values())
