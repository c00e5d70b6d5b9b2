"""Starts the processes of all engine cores that the options ask for, each with its slice of this host's devices.

They load side by side. What must not be the same for two of them, such as a port, follows from a core's number. Where
Ray places processes it gives each of them its devices, those of cores like the others. This
module knows neither requests nor how a process is kept running.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxpaged.config import EngineConfig
from jaxpaged.engine.core_calls import folder_of_core
from jaxpaged.engine.observability.tracing import check_tracing
from jaxpaged.engine.process import wire
from jaxpaged.engine.process.core_supervisor import CoreSupervisor
from jaxpaged.executor.device_slices import ALL_DEVICES, device_slices
from jaxpaged.messages import Progress
from jaxpaged.plugins import registered

NUM_PORTS = 3
"""That an engine core uses, from `master_port` on."""


class ProgressOfAll:
    """Adds up how far several cores are. Each of them tells from a thread of its own."""

    def __init__(self, progress: Progress, num_cores: int):
        self._progress = progress
        self._told: dict[str, list[tuple[int, int]]] = {}  # by stage: done, and how much there is, of each core
        self._num_cores = num_cores

    def of(self, number: int) -> Progress:
        """What core `number` is to tell."""

        def tell(stage: str, done: int, total: int) -> None:
            told = self._told.setdefault(stage, [(0, total)] * self._num_cores)
            told[number] = done, total
            self._progress(stage, *map(sum, zip(*told, strict=True)))

        return tell


def core_config(config: EngineConfig, number: int) -> EngineConfig:
    """The options of one of several cores: KV events and those who compute with it on its own ports, profiles in its
    own folder."""
    if config.parallel.num_cores == 1:
        return config
    cache, profiler = config.cache, config.profiler
    if cache.kv_events_config:
        cache = dataclasses.replace(cache, kv_events_config={**cache.kv_events_config, "data_parallel_rank": number})
    if profiler.profile_dir is not None:
        profiler = dataclasses.replace(profiler, profile_dir=folder_of_core(profiler.profile_dir, number))
    port = config.parallel.master_port + NUM_PORTS * number
    parallel = dataclasses.replace(config.parallel, master_port=port)
    return dataclasses.replace(config, cache=cache, profiler=profiler, parallel=parallel)


def with_registered(config: EngineConfig) -> EngineConfig:
    """The options with the places of models that this process has registered, since others run another program. Raises
    ConfigError for one that only this process has."""
    plugin = tuple(dict.fromkeys((*config.plugins.plugin, *registered.places())))
    return dataclasses.replace(config, plugins=dataclasses.replace(config.plugins, plugin=plugin))


def config_of_all(of_first: EngineConfig, given: EngineConfig) -> EngineConfig:
    """The resolved options of the engine, from those of its first core: what is its own is as it was given."""
    cache = dataclasses.replace(of_first.cache, kv_events_config=given.cache.kv_events_config)
    return dataclasses.replace(of_first, cache=cache, profiler=given.profiler)


def started(
    config: EngineConfig, progress: Progress | None, loaded: Callable[[wire.CoreFacts], Any], **options: Any
) -> tuple[list[CoreSupervisor], Any]:
    """What keeps each core of `config` running, once all of them serve, and what `loaded` makes of the facts of the
    first one while they read the weights. `options` are those of `CoreSupervisor`.

    Raises ConfigError when the host has too few devices, before anything is started for traces that cannot be sent, and
    what loading raises; then nothing is left running.
    """
    check_tracing(config)
    config = with_registered(config)
    num_cores, devices_each = config.parallel.num_cores, config.parallel.devices_of_core
    placed = config.parallel.distributed_executor_backend == "ray"
    slices = [ALL_DEVICES] * num_cores if placed else device_slices(num_cores, devices_each)
    heard = ProgressOfAll(progress or (lambda stage, done, total: None), num_cores)
    supervisors: list[CoreSupervisor] = []
    try:
        for number, devices in enumerate(slices):
            name = "the engine core" if num_cores == 1 else f"engine core {number}"
            supervisors.append(
                CoreSupervisor(core_config(config, number), heard.of(number), name=name, devices=devices, **options)
            )
        for supervisor in supervisors:
            supervisor.begin()
        facts = [supervisor.facts() for supervisor in supervisors]
        made = loaded(facts[0])
        for supervisor in supervisors:
            supervisor.wait_until_serving()
    except BaseException:
        for supervisor in supervisors:
            supervisor.close()
        raise
    return supervisors, made
