"""Plans an engine for devices that are not here: where the planner meets options and targets. Nothing is executed."""

from dataclasses import replace
from pathlib import Path

from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.config.plan import Plan
from jaxpaged.errors import ConfigError
from jaxpaged.messages import Progress
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Model
from jaxpaged.worker.planning.planner import Planner, largest_split
from jaxpaged.worker.planning.targets import parse_target


def plan_on_target(
    config: EngineConfig,
    model: Model,
    decoder: DecoderConfig,
    facts: ModelFacts,
    target_name: str,
    *,
    compile: bool,
    output: Path | None,
    progress: Progress,
    choose_split: bool = True,
) -> Plan:
    """The plan of the engine that `config`, not yet resolved, describes; with `choose_split` a model that is not split
    yet is split over as many of the target's devices as it can be.

    With `output` every program is compiled and written there as a bundle, if the engine fits. Raises ConfigError for
    an unknown target and for options that contradict each other.
    """
    if (num_stages := config.parallel.pipeline_parallel_size) > 1 and output is not None:
        raise ConfigError(f"pipeline_parallel_size is {num_stages}, but a bundle has programs of one stage only.")
    target = parse_target(target_name, compile=compile)
    num_cores, num_devices = config.parallel.data_parallel_size, min(target.num_devices, max(target.host_sizes))
    if choose_split and config.parallel.tensor_parallel_size == 1:
        settled = config.resolve(facts, target.platform)
        shards = largest_split(settled, model, decoder, target, num_devices // (num_cores * num_stages))
        config = replace(config, parallel=replace(config.parallel, tensor_parallel_size=shards))
    if num_cores > 1 and (needed := num_cores * config.parallel.devices_of_core) > num_devices:
        raise ConfigError(
            f"data_parallel_size is {num_cores}, tensor_parallel_size {config.parallel.tensor_parallel_size} and "
            f"pipeline_parallel_size {num_stages}, which takes {needed} devices, but a host of {target_name} has "
            f"{num_devices}. Lower one of them."
        )
    planner = Planner(config.resolve(facts, target.platform), model, decoder, target)
    plan = planner.plan(all_programs=output is not None, progress=progress)
    if output is not None and plan.fits:
        planner.save(output, progress)
    return plan
