"""Custom logits processors: a host part that reads a request's parameters, a traced part that changes its logits.

    class BanBelow:
        num_params = 1  # token ids below extra_args["ban_below"] are never drawn

        def params_of(self, params: SamplingParams) -> list[float] | None:
            wanted = (params.extra_args or {}).get("ban_below")
            return None if wanted is None else [float(wanted)]

        def apply(self, logits_V: jax.Array, params_P: jax.Array) -> jax.Array:
            return jnp.where(jnp.arange(len(logits_V)) < params_P[0], -jnp.inf, logits_V)

    LLM(..., logits_processors=[BanBelow])        # or "my_package.processors:BanBelow"

`apply` is traced once, for one row of float32 logits after penalties and bad words and before the temperature, and
is vectorised over the rows; it sees only the requests for which `params_of` returned numbers.
This module does not know where requests come from: `params_of` may raise RequestError to refuse one.

Letters: P parameters of custom logits processors.
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.errors import ConfigError, RequestError
from jaxpaged.sampling.rows import FIRST_CUSTOM_BIT, MAX_CUSTOM, RowParams
from jaxpaged.sampling_params import SamplingParams


class LogitsProcessor(Protocol):
    num_params: int
    """How many numbers describe one request."""

    def params_of(self, params: SamplingParams) -> list[float] | None:
        """`num_params` numbers for a request, or None if it is not concerned. Runs on the host, once a request."""
        ...

    def apply(self, logits_V: jax.Array, params_P: jax.Array) -> jax.Array:
        """Changed logits [V], float32. Traced: no side effects, no branches on values."""
        ...


@dataclass(frozen=True)
class CustomProcessors:
    """The engine's processors, applied in their order. Without any, nothing is traced."""

    processors: tuple[LogitsProcessor, ...] = ()

    @property
    def num_params(self) -> int:
        """Numbers that a row keeps for all of them."""
        return sum(processor.num_params for processor in self.processors)

    def of(self, params: SamplingParams) -> tuple[int, np.ndarray]:
        """(Bits for `SamplingRows.set`, numbers [num_params] for `pack_row`) of one request.

        Raises RequestError if a processor refuses the request or gives something else than its numbers.
        """
        bits, numbers = 0, np.zeros(self.num_params, np.float32)
        for bit, start, processor in self._places():
            values = processor.params_of(params)
            if values is None:
                continue
            if len(values) != processor.num_params or not all(math.isfinite(value) for value in values):
                raise RequestError(
                    f"logits processor {type(processor).__name__} made {values!r} of this request, but must make "
                    f"{processor.num_params} finite numbers. Check the request's extra_args.",
                    "extra_args",
                )
            bits |= bit
            numbers[start : start + processor.num_params] = values
        return bits, numbers

    def apply(self, logits_SV: jax.Array, params_SP: jax.Array, rows: RowParams) -> jax.Array:
        """Change the logits of the rows concerned; a processor that concerns no row of the step does no work."""
        for bit, start, processor in self._places():
            concerned_S = rows.has(bit)
            logits_SV = jax.lax.cond(
                jnp.any(concerned_S),
                partial(change_rows, processor),
                lambda concerned_S, logits_SV, params_SP: logits_SV,
                concerned_S,
                logits_SV,
                params_SP[:, start : start + processor.num_params],
            )
        return logits_SV

    def _places(self) -> list[tuple[int, int, LogitsProcessor]]:
        """(Its bit, where its numbers begin in a row, processor) of each."""
        places, start = [], 0
        for i, processor in enumerate(self.processors):
            places.append((1 << (FIRST_CUSTOM_BIT + i), start, processor))
            start += processor.num_params
        return places


NO_PROCESSORS = CustomProcessors()


def change_rows(
    processor: LogitsProcessor, concerned_S: jax.Array, logits_SV: jax.Array, params_SP: jax.Array
) -> jax.Array:
    changed_SV = jax.vmap(processor.apply)(logits_SV, params_SP)
    return jnp.where(concerned_S[:, None], changed_SV, logits_SV)


def load_processors(specs: Sequence[Any]) -> CustomProcessors:
    """Make the processors named by classes or "module:Class" texts. Raises ConfigError."""
    if len(specs) > MAX_CUSTOM:
        raise ConfigError(f"{len(specs)} logits_processors are given; at most {MAX_CUSTOM} are possible.")
    return CustomProcessors(tuple(load_processor(spec) for spec in specs))


def load_processor(spec: Any) -> LogitsProcessor:
    cls = import_class(spec) if isinstance(spec, str) else spec
    if not isinstance(cls, type):
        raise ConfigError(f"logits processor {spec!r} is no class. Give a class or 'module:Class'.")
    try:
        processor = cls()
    except Exception as error:
        raise ConfigError(
            f"logits processor {spec!r} could not be made: {error}. Its class is called without arguments."
        ) from error
    missing = [name for name in ("num_params", "params_of", "apply") if not hasattr(processor, name)]
    if missing:
        raise ConfigError(
            f"logits processor {spec!r} has no {', '.join(missing)}. See jaxpaged.sampling.custom for an example."
        )
    if isinstance(processor.num_params, bool) or not isinstance(processor.num_params, int) or processor.num_params < 0:
        raise ConfigError(f"logits processor {spec!r} has num_params {processor.num_params!r}; it must count numbers.")
    return processor


def import_class(spec: str) -> Any:
    module_name, colon, class_name = spec.partition(":")
    if not (module_name and colon and class_name):
        raise ConfigError(f"logits processor {spec!r} is no class name. Write 'module:Class'.")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"logits processor {spec!r} cannot be imported: {error}. Check the name and the Python path."
        ) from error
