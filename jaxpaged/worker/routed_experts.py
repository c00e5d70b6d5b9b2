"""The experts that the tokens of a step went to, on their way to the host.

Letters: B attention ranks, L blocks of experts, J experts of a token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpaged.messages import ModelRunnerOutput


class ExpertsOfStep(NamedTuple):
    """Of a single step: the array of all ranks has padding behind the `num_tokens` of each."""

    num_tokens: Sequence[int]
    expert_TLJ: np.ndarray

    def read(self, output: ModelRunnerOutput) -> None:
        of_ranks = np.split(np.asarray(self.expert_TLJ), len(self.num_tokens))
        output.routed_experts = np.concatenate([each[:count] for each, count in zip(of_ranks, self.num_tokens)])


class ExpertsOfSteps(NamedTuple):
    """Of several decode steps in one program. `num_most`: how many tokens each request of each rank may get; as many
    it computes."""

    num_most: Sequence[Sequence[int]]
    expert_IRLJ: np.ndarray

    def read(self, output: ModelRunnerOutput) -> None:
        of_ranks = np.split(np.asarray(self.expert_IRLJ), len(self.num_most))
        pairs = zip(of_ranks, self.num_most)
        lines = [steps[:count, row] for steps, counts in pairs for row, count in enumerate(counts)]
        output.routed_experts = np.concatenate(lines)
