"""A worker with methods of the operator's, which `collective_rpc` calls by name, from another process too.

    class Norms:  # --worker-extension-cls my_package.norms:Norms
        def embedding_norm(self) -> float:
            return float(jnp.linalg.norm(self.device.params.embed_tokens))

    await engine.collective_rpc("embedding_norm")  # a result of each process that computes

The class is mixed into `Worker`, so that `self` is the worker. It may replace nothing that a worker has. Arguments and
results go between processes as plain data, never as pickles.
"""

import functools
import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxpaged.errors import ConfigError, UsageError, did_you_mean
from jaxpaged.worker.worker import Worker

logger = logging.getLogger(__name__)


class ExtendedWorker(Worker):
    """A worker with an extension, which has `declared` these methods."""

    declared: frozenset[str] = frozenset()

    def call_extension(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a method of the extension returns, as plain data. Raises UsageError for a name that it has not declared,
        and for a result that is none."""
        if method not in self.declared:
            near = did_you_mean(method, self.declared)
            raise UsageError(
                f"the worker extension declares no {method!r}.{near} It has {', '.join(sorted(self.declared))}."
            )
        result = getattr(self, method)(*args, **kwargs)
        try:
            return msgspec.to_builtins(result)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{method} returned what is no plain data: {error}. Return numbers, texts, lists."
            ) from error


def worker_class(place: str | None) -> type[Worker]:
    """`Worker`, with the extension that the option `worker_extension_cls` names. Raises ConfigError for one that cannot
    be used."""
    return Worker if place is None else extended(place)


@functools.cache
def extended(place: str) -> type[Worker]:
    """The same class for the same name."""
    module, _, name = place.replace(":", ".").rpartition(".")
    try:
        extension = getattr(importlib.import_module(module), name)
    except Exception as error:
        logger.error("worker_extension_cls %s cannot be loaded", place, exc_info=error)
        raise ConfigError(
            f"worker_extension_cls {place!r} cannot be loaded: {type(error).__name__}: {error}. It must be importable "
            "wherever the engine computes; the log has the traceback."
        ) from error
    if not isinstance(extension, type):
        raise ConfigError(f"worker_extension_cls {place!r} is {extension!r}, and no class.")
    names = {each for cls in extension.__mro__[:-1] for each in vars(cls) if not each.startswith("__")}
    if taken := sorted(name for name in names if hasattr(Worker, name)):
        raise ConfigError(
            f"worker_extension_cls {place!r} has {', '.join(taken)}, which every worker has. Choose other names."
        )
    declared = frozenset(each for each in names if callable(getattr(extension, each)) and not each.startswith("_"))
    return type("ExtendedWorker", (ExtendedWorker, extension), {"declared": declared})
