"""Outputs of several steps as one: one output a request.

Usually a front end is told the outputs of one step. More gather while the core awaits all that is in flight, to reset
its cache or to sleep, and on the front end's side while that does not keep up.
"""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from jaxpaged.messages import EngineCoreOutput, EngineCoreOutputs

NEWEST = ("num_cached_tokens", "num_preemptions")
"""Fields in which a later output says how things are now. In the others it may have nothing to say."""
GROWING = ("new_token_ids", "new_logprobs", "processed_logprobs", "sampling_mask", "routed_experts")
"""Fields in which it says what came besides."""
OTHERS = tuple(name for name in EngineCoreOutput.__struct_fields__[1:] if name not in (*NEWEST, *GROWING))


def without(outputs: Sequence[EngineCoreOutput], request_ids: Iterable[str]) -> list[EngineCoreOutput]:
    """The outputs of all other requests."""
    unwanted: Collection[str] = frozenset(request_ids)
    return [output for output in outputs if output.request_id not in unwanted]


def as_one(steps: Sequence[EngineCoreOutputs]) -> EngineCoreOutputs:
    """What several steps said, one after the other, as if it were a run of them. Their outputs are used up."""
    if len(steps) == 1:
        return steps[0]
    num_steps = sum(step.stats.num_steps for step in steps)
    stats = msgspec.structs.replace(steps[-1].stats, num_steps=num_steps)
    return EngineCoreOutputs(merged(step.outputs for step in steps), stats)


def merged(lists: Iterable[list[EngineCoreOutput]]) -> list[EngineCoreOutput]:
    """One output a request, of lists that came one after the other and have at most one each."""
    outputs: dict[str, EngineCoreOutput] = {}
    for each in lists:
        for output in each:
            before = outputs.setdefault(output.request_id, output)
            if before is not output:
                join(before, output)
    return list(outputs.values())


def join(first: EngineCoreOutput, second: EngineCoreOutput) -> None:
    """Add to `first` what the next output of the same request says. Where a front end does not keep up, this is done
    for most tokens, and most outputs say nothing but tokens."""
    assert first.finish_reason is None, f"{first.request_id} had ended, and says more"
    first.new_token_ids.extend(second.new_token_ids)
    first.num_cached_tokens, first.num_preemptions = second.num_cached_tokens, second.num_preemptions
    if second.new_logprobs:
        first.new_logprobs = [*(first.new_logprobs or ()), *second.new_logprobs]
    if second.processed_logprobs:
        first.processed_logprobs = [*(first.processed_logprobs or ()), *second.processed_logprobs]
    if second.sampling_mask:
        first.sampling_mask = [*(first.sampling_mask or ()), *second.sampling_mask]
    if second.routed_experts:
        first.routed_experts = [*(first.routed_experts or ()), *second.routed_experts]
    for name in OTHERS:
        value = getattr(second, name)
        if value is not None:
            setattr(first, name, value)
