"""Plans an engine for devices that are not here: where the planner meets options and targets. Nothing is executed."""

from dataclasses import replace
from pathlib import Path

from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.engine.build import facts_of, make_output_folder, read_wanted, with_draft_model, with_plugins_named
from jaxpaged.errors import ConfigError
from jaxpaged.messages import Progress
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Model
from jaxpaged.models.pooling import pooling_model
from jaxpaged.params.hub import DESCRIPTION_FILES, resolve_model_folder
from jaxpaged.pooling import resolved_pooling
from jaxpaged.tools.planning.plan import Plan
from jaxpaged.tools.planning.planner import Planner, largest_split
from jaxpaged.tools.planning.targets import parse_target


def plan_engine(
    config: EngineConfig,
    target_name: str,
    *,
    compile: bool = True,
    output: Path | None = None,
    progress: Progress | None = None,
    choose_split: bool = True,
) -> Plan:
    """What the engine of `config` would need and could do on a target such as "v6e:2x4"; no weight is read.

    With `choose_split` a `tensor_parallel_size` of 1 is as many of the target's devices as can share the model.
    `output` is an empty folder for the compiled programs, a bundle that only such devices take. Meant for a process
    of its own: compiling for a TPU sets this one to compute on the CPU. Raises UsageError for what cannot be planned.
    """
    if output is not None:
        make_output_folder(output)
    config = with_plugins_named(config)
    model_config = config.model
    where = (model_config.revision, config.load.download_dir)
    folder = resolve_model_folder(model_config.model, *where, wanted=DESCRIPTION_FILES)
    model, decoder = read_wanted(config, folder)
    model = with_draft_model(config, model, decoder, folder, wanted=DESCRIPTION_FILES)
    facts = facts_of(decoder, folder)
    asked = (model_config.runner, model_config.convert, model_config.pooler_config)
    wanted = resolved_pooling(*asked, facts.task, facts.pooler)
    if wanted["runner"] == "pooling":
        model = pooling_model(model, wanted["convert"])
    return plan_on_target(
        config,
        model,
        decoder,
        facts,
        target_name,
        compile=compile,
        output=output,
        progress=progress or (lambda stage, done, total: None),
        choose_split=choose_split,
    )


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
