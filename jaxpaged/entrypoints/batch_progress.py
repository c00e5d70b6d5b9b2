"""How far a batch is, with tokens per second: on a terminal and in a notebook, and nowhere else.

Time in which the batch waited for programs to be compiled says nothing of how fast the engine is, and does not count.
"""

import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self

from jaxpaged.engine.observability.step_times import ProgramWaits
from jaxpaged.messages import RequestOutput, StepRecord
from jaxpaged.pooling import PoolingRequestOutput

LOOK_SECONDS = 1.0


class BatchProgress:
    """A tqdm bar. `use_tqdm` may be a function that makes the bar, and is then always called. `step_records` gives the
    newest steps of the engine, and how many before them are forgotten."""

    def __init__(
        self,
        total: int,
        use_tqdm: bool | Callable[..., Any],
        unit: str = "prompt",
        *,
        step_records: Callable[[], tuple[Sequence[StepRecord], int]] = lambda: ((), 0),
    ):
        self._bar: Any = None
        self._step_records = step_records
        self._left = total
        self._start, self._waited = time.time(), 0.0
        self._looked = -math.inf  # when it was last found out how long the batch waited
        self._tokens_in = self._tokens_out = 0
        if not use_tqdm or (use_tqdm is True and not (sys.stderr.isatty() or in_notebook())):
            return
        make_bar = bar_class() if use_tqdm is True else use_tqdm
        self._bar = make_bar(total=total, desc=f"{unit.capitalize()}s", unit=unit, dynamic_ncols=True)

    def advance(self, *outputs: RequestOutput | PoolingRequestOutput) -> None:
        """One more is done, with these results."""
        if self._bar is None:
            return
        for output in outputs:
            self._tokens_in += len(output.prompt_token_ids)
            if isinstance(output, RequestOutput):
                self._tokens_out += sum(len(completion.token_ids) for completion in output.outputs)
        self._left -= 1
        seconds = max(self._computing_seconds(), 1e-9)
        speeds = f"in {self._tokens_in / seconds:.0f} tok/s, out {self._tokens_out / seconds:.0f} tok/s"
        self._bar.set_postfix_str(speeds, refresh=False)
        self._bar.update(1)

    def _computing_seconds(self) -> float:
        """Since the start, without waits for programs; these are looked for once a second, and at the end."""
        now = time.time()
        if not self._left or abs(now - self._looked) >= LOOK_SECONDS:
            self._looked, self._waited = now, ProgramWaits(self._step_records()[0]).between(self._start, now)
        return now - self._start - self._waited

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code: it shows what is written to standard error, which is no terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def bar_class() -> type:
    """A bar of widgets in notebooks that have them, one of text elsewhere, without a warning where widgets lack."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    return tqdm
