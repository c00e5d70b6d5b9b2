"""The sizes of single steps in a record that may be a run of them. This module knows records, not what is drawn."""

from jaxpaged.messages import StepRecord


def step_sizes(record: StepRecord) -> list[int]:
    """Tokens of every step of a record. Those of a run are as equal as they can be: only their sum is on record."""
    if not record.num_steps:
        return []
    size, num_larger = divmod(record.num_tokens, record.num_steps)
    return [size + 1] * num_larger + [size] * (record.num_steps - num_larger)


def padding(record: StepRecord) -> int:
    """Tokens of padding, in all steps of a record."""
    return record.token_bucket * record.num_steps - record.num_tokens


def mean_per_step(record: StepRecord, total: int) -> float:
    """What a total is per step; 0 for a run all of whose requests had ended before."""
    return total / max(record.num_steps, 1)
