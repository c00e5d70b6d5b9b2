"""The one place where an engine is put together from its parts.

Options that contradict the model or each other, a missing tokenizer and a damaged template are found here, before
any weight is read.
"""

import atexit
import contextlib
import dataclasses
import logging
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.config.hf_overrides import overridden
from jaxpaged.config.speculation import checked_speculation, draft_model_of
from jaxpaged.core.grammar.matcher import Grammars
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.embeds_desk import EmbedsDesk
from jaxpaged.engine.front_end import load_input_processor
from jaxpaged.engine.input.processor import InputProcessor
from jaxpaged.engine.input.tokenizer import load_tokenizer
from jaxpaged.engine.observability.tracing import check_tracing
from jaxpaged.engine.pooling.pooler import load_pooler_defaults, load_text_length
from jaxpaged.engine.process.wire import CoreFacts, Reports
from jaxpaged.errors import CheckpointError, ConfigError, UsageError
from jaxpaged.executor.base import Executor
from jaxpaged.executor.uniproc import UniProcExecutor, platform
from jaxpaged.messages import Progress
from jaxpaged.models import eagle3
from jaxpaged.models.config import DecoderConfig, load_hf_config
from jaxpaged.models.eagle3 import EAGLE3
from jaxpaged.models.interface import DraftModel, Head, HeadConfig, Model
from jaxpaged.models.pooling import pooling_model
from jaxpaged.models.registry import MODELS, model_for, task_of
from jaxpaged.models.seeing import without_decoder, without_encoder
from jaxpaged.params.checkpoint import settled_quantization
from jaxpaged.params.hub import WANTED_FILES, resolve_model_folder
from jaxpaged.params.kv_scales import named_type
from jaxpaged.params.mistral_folder import in_own_words
from jaxpaged.plugins.loading import load_plugins
from jaxpaged.plugins.sources import chosen_names

if TYPE_CHECKING:
    from jaxpaged.engine.observability.kv_event_publisher import KVEventPublisher
    from jaxpaged.executor.group import Group

logger = logging.getLogger(__name__)


def compile_bundle(config: EngineConfig, output: Path, progress: Progress | None = None) -> None:
    """Compile every program of the engine that `config` describes and write them to `output`, an empty folder.

    Everything is compiled anew: on a CPU, a program from the compilation cache has lost what another copy would need.
    `config.compile.bundle` must be None. Raises UsageError, CheckpointError or CapacityError.
    """
    make_output_folder(output)
    check_one_process(config)
    if (num_stages := config.parallel.pipeline_parallel_size) > 1:
        raise ConfigError(f"pipeline_parallel_size is {num_stages}, but a bundle has programs of one stage only.")
    config = dataclasses.replace(config, compile=dataclasses.replace(config.compile, compilation_cache_dir="off"))
    folder, model, decoder, config = resolve_model(config)
    executor = UniProcExecutor(config, model, decoder, folder, progress)
    try:
        executor.worker.save_bundle(output)
    finally:
        executor.shutdown()


def make_output_folder(folder: Path) -> None:
    """Raise UsageError unless the folder is empty and can be written: that must not come out after the compiling."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} exists and is not empty. Choose a new folder.")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}. Choose another folder.") from None


def build_parts(
    config: EngineConfig, progress: Progress | None = None
) -> tuple[EngineConfig, InputProcessor, EngineCore]:
    """Load what `config` names: the resolved options, the front end and the core of an engine in this process.
    `progress` hears how far loading is.

    Raises ConfigError, CheckpointError or CapacityError.
    """
    check_one_process(config)
    folder, model, decoder, config = resolve_model(config)
    input_processor = build_input_processor(config, decoder, folder)
    with event_publishers(config) as publishers:
        executor = UniProcExecutor(config, model, decoder, folder, progress)
        grammars = build_grammars(input_processor, decoder)
        core = EngineCore(config, executor, grammars, publishers, executor.kv_transfer, embeds_desk(executor))
    if executor.kv_transfer is not None or executor.embeds_folder is not None:
        shut_down_at_exit(core)
    return config, input_processor, core


def embeds_desk(executor: UniProcExecutor) -> EmbedsDesk | None:
    """What finds embeddings that other engines have computed, if the options name where they are."""
    folder = executor.embeds_folder
    return None if folder is None or not folder.transfer.loads else EmbedsDesk(folder, executor.embeds_space)


def shut_down_at_exit(core: EngineCore) -> None:
    """What a core keeps besides the device is whole, too, where a program ends that never shuts it down."""
    reference = weakref.ref(core)

    def shut_down() -> None:
        if (found := reference()) is not None:
            found.shutdown()

    atexit.register(shut_down)


def check_one_process(config: EngineConfig) -> None:
    """Raise ConfigError where an engine in the caller's process is to compute with others."""
    if config.parallel.num_cores > 1:
        raise ConfigError(
            f"data_parallel_size is {config.parallel.data_parallel_size}, but this engine computes in the process that "
            "asks it. Use `jaxpaged serve` or AsyncLLM, which have a process for each core."
        )
    count = config.parallel.num_processes
    if count > 1:
        raise ConfigError(
            f"distributed_executor_backend and nnodes ask for {count} processes, but here the engine computes in the "
            "caller's. Use `jaxpaged serve` or AsyncLLM, or leave them out: one process computes with all its devices."
        )


@contextlib.contextmanager
def event_publishers(config: EngineConfig) -> Iterator["Sequence[KVEventPublisher]"]:
    """What publishes the KV events of each attention rank, if the options ask for that; they are the caller's unless
    building the engine fails.

    Raises ConfigError, and UsageError for a taken address, before any weight is read.
    """
    if not config.cache.kv_events_config:
        yield ()
        return
    from jaxpaged.engine.observability.kv_event_publisher import KVEventPublisher, KVEventsConfig  # with ZeroMQ

    wanted = KVEventsConfig.from_option(config.cache.kv_events_config)
    if wanted is not None and not config.cache.enable_prefix_caching:
        raise ConfigError("kv_events_config asks for events, but enable_prefix_caching is off: there would be none.")
    publishers: list[KVEventPublisher] = []
    try:
        if wanted is not None:
            first = wanted.data_parallel_rank
            for rank in range(first, first + config.parallel.num_ranks):
                publishers.append(KVEventPublisher(wanted.of_rank(rank)))
        yield publishers
    except BaseException:
        for each in publishers:
            each.close()
        raise


def build_grammars(input_processor: InputProcessor, decoder: DecoderConfig) -> Grammars | None:
    """What compiles structured outputs for a model's vocabulary; None without a tokenizer."""
    if not input_processor.has_tokenizer:
        return None
    tokenizer_json = input_processor.tokenizer.backend.to_str()
    return Grammars(tokenizer_json, decoder.vocab_size, input_processor.eos_token_ids)


def build_core(config: EngineConfig, reports: Reports) -> EngineCore:
    """Load what `config` names, for front ends in other processes: they are told the facts before any weight is read.

    Raises ConfigError, CheckpointError or CapacityError.
    """
    group = open_group(config, reports)
    folder, model, decoder, config = resolve_model(config)
    tokenizer_folder = find_tokenizer_folder(config, folder)
    numbers = embed_numbers_of(decoder)
    reports.announce(CoreFacts(config.options(), decoder.vocab_size, str(folder), str(tokenizer_folder), numbers))
    with event_publishers(config) as publishers:
        executor = make_executor(config, model, decoder, folder, group, reports.progress)
        input_processor = load_input_processor(config, decoder.vocab_size, folder, tokenizer_folder)
        grammars = build_grammars(input_processor, decoder)
        if not isinstance(executor, UniProcExecutor):
            return EngineCore(config, executor, grammars, publishers)
        return EngineCore(config, executor, grammars, publishers, executor.kv_transfer, embeds_desk(executor))


def open_group(config: EngineConfig, reports: Reports) -> "Group | None":
    """The processes that compute with this one, once they have joined; None if it computes alone."""
    if config.parallel.num_processes == 1:
        return None
    from jaxpaged.engine.process.gathering import gather_group  # with sockets and their keys

    return gather_group(config, reports.progress, reports.fail)


def make_executor(
    config: EngineConfig,
    model: Model,
    decoder: DecoderConfig,
    folder: Path,
    group: "Group | None",
    progress: Progress | None,
) -> Executor:
    if group is None:
        return UniProcExecutor(config, model, decoder, folder, progress)
    from jaxpaged.executor.multiproc import MultiProcExecutor

    return MultiProcExecutor(config, model, decoder, folder, group, progress)


def run_follower() -> None:
    """What a process runs that computes with others as one."""
    from jaxpaged.engine.process import follower_process

    follower_process.run(resolve_model)


def resolve_model(config: EngineConfig) -> tuple[Path, Model, DecoderConfig, EngineConfig]:
    """Find and read the model: its folder, its functions, its description, and the options settled for it."""
    check_tracing(config)
    config = with_plugins_named(config)
    folder = resolve_model_folder(config.model.model, config.model.revision, config.load.download_dir)
    model, decoder = read_wanted(config, folder)
    config = config.resolve(facts_of(decoder, folder), platform(config.cache.gpu_memory_utilization))
    model = with_draft_model(config, model, decoder, folder)
    if config.model.runner == "pooling":
        model = pooling_model(model, config.model.convert)
    if decoder.sees_both_ways:
        logger.info(
            "%s is an encoder: each prompt is computed whole, without chunked prefill and prefix caching",
            decoder.architecture,
        )
    return folder, model, decoder, config


def with_plugins_named(config: EngineConfig) -> EngineConfig:
    """The options with the names of the installed plugins that load. Raises ConfigError for one that is not there."""
    names = chosen_names(config.plugins.plugins)
    return dataclasses.replace(config, plugins=dataclasses.replace(config.plugins, plugins=names))


def models_of(config: EngineConfig) -> Mapping[str, Model]:
    """Every architecture that may be meant: those that are built in, and those of plugins. Raises ConfigError."""
    return load_plugins(config.plugins.plugin, config.plugins.plugins).joined("models", MODELS)


def read_wanted(config: EngineConfig, folder: Path) -> tuple[Model, DecoderConfig]:
    """`read_model`, of which the options may leave a part out. Raises CheckpointError."""
    options = config.multimodal
    sees_nothing = options.language_model_only and not options.enable_mm_embeds
    model, decoder = read_model(
        folder, config.model.hf_overrides, sees_nothing, options.mm_processor_kwargs, models_of(config)
    )
    if options.mm_encoder_only:
        return without_decoder(model, decoder)
    if options.language_model_only and decoder.vision is not None:
        model = without_encoder(model)
    return model, decoder


def read_model(
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
    language_model_only: bool = True,
    processor_options: Mapping[str, Any] | None = None,
    models: Mapping[str, Model] = MODELS,
) -> tuple[Model, DecoderConfig]:
    """The functions and the description of the model in `folder`, which is one of `models`, with `overrides` of fields
    of its config.json, and unless it is `language_model_only` with its tower, if it has one."""
    hf_config = overridden(load_hf_config(folder), overrides or {})
    try:
        with in_own_words(folder):
            model = model_for(hf_config, language_model_only, models)
            decoder = model.config_from_hf(hf_config)
        if model.vision is not None and decoder.vision is not None:
            from jaxpaged.multimodal.processors import load_processor  # with Pillow

            processor = load_processor(folder, hf_config, processor_options or {})
            model = dataclasses.replace(model, vision=dataclasses.replace(model.vision, processor=processor))
        return model, with_settled_quantization(model, decoder, folder)
    except CheckpointError as error:
        if not overrides:
            raise
        raise ConfigError(f"hf_overrides sets {', '.join(overrides)}. With that, {error}") from error


def with_settled_quantization(model: Model, decoder: DecoderConfig, folder: Path) -> DecoderConfig:
    """The description of a quantised checkpoint with what only its files say of single modules."""
    if decoder.quantization is None:
        return decoder
    settled = settled_quantization(decoder.quantization, model.param_specs(decoder, 1), folder)
    return dataclasses.replace(decoder, quantization=settled)


def with_draft_model(
    config: EngineConfig, model: Model, decoder: DecoderConfig, folder: Path, wanted: Sequence[str] = WANTED_FILES
) -> Model:
    """The model of `folder` with what is to draft for it, if anything is. `wanted`: files of that from the hub.

    Raises ConfigError when the two do not go together, and CheckpointError.
    """
    given = checked_speculation(config.speculative.speculative_config)
    if given.get("method") == "mtp":
        return dataclasses.replace(model, draft=own_layer(config, model, decoder, folder))
    name = draft_model_of(given, config.model.model)
    if name is None:
        return model
    draft: Model | Head
    length = config.model.max_model_len or decoder.max_position_embeddings
    draft_folder = resolve_model_folder(name, given.get("revision"), config.load.download_dir, wanted=wanted)
    if given["method"] == "eagle3":
        draft, draft_decoder = EAGLE3, eagle3.config_from_hf(load_hf_config(draft_folder), draft_folder, decoder)
    else:
        draft, draft_decoder = read_model(draft_folder, models=models_of(config))
    if draft_decoder.vocab_size != decoder.vocab_size:
        raise ConfigError(
            f"speculative_config.model {name} knows {draft_decoder.vocab_size} tokens, and {config.model.model} "
            f"{decoder.vocab_size}. Choose a model with the same vocabulary."
        )
    if isinstance(draft, Model) and draft_decoder.max_position_embeddings < length:
        raise ConfigError(
            f"speculative_config.model {name} was made for {draft_decoder.max_position_embeddings} positions, and "
            f"max_model_len is {length}. Lower max_model_len, or choose another model to draft."
        )
    if not config.model.skip_tokenizer_init:
        check_same_tokens(folder, draft_folder)
    return dataclasses.replace(model, draft=DraftModel(draft, draft_decoder, draft_folder, given.get("quantization")))


def own_layer(config: EngineConfig, model: Model, decoder: DecoderConfig, folder: Path) -> DraftModel:
    """The layer of a model's own checkpoint that drafts. Raises ConfigError when there is none."""
    if model.mtp is None or decoder.num_mtp_layers != 1:
        raise ConfigError(
            f"speculative_config.method is 'mtp', and {config.model.model} ({decoder.architecture}) has "
            f"{decoder.num_mtp_layers} layers that predict further tokens; it takes 1. Choose another method."
        )
    description = HeadConfig(**{**vars(decoder), "num_layers": 1, "layers": decoder.layers[-1:]})
    return DraftModel(model.mtp, description, folder, config.model.quantization)


def check_same_tokens(folder: Path, draft_folder: Path) -> None:
    """Raise ConfigError when the tokenizers of two models, so far as both have one, give tokens other ids."""
    files = [each / "tokenizer.json" for each in (folder, draft_folder)]
    if not all(file.exists() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    own, others = (set(load_tokenizer(each).backend.get_vocab().items()) for each in (folder, draft_folder))
    if own != others:
        raise ConfigError(
            f"speculative_config.model has another tokenizer: {len(own - others)} of {len(own)} tokens have another "
            f"id, or none, in {draft_folder}. Choose a model with the same tokens."
        )


def facts_of(decoder: DecoderConfig, folder: Path | None = None) -> ModelFacts:
    """What checking the options needs of a model. Its `folder` may say how it is pooled."""
    pooler = {**decoder.pooling_defaults, **(load_pooler_defaults(folder) if folder else {})}
    task, is_encoder = task_of(decoder.architecture), decoder.sees_both_ways
    return ModelFacts(
        max_position_embeddings=decoder.max_position_embeddings,
        dtype=decoder.dtype,
        num_heads=decoder.num_heads,
        vocab_size=decoder.vocab_size,
        has_experts=decoder.experts is not None,
        kv_cache_dtype=named_type(load_hf_config(folder), folder) if folder and decoder.quantization else "",
        task="embed" if pooler and task == "generate" else task,
        pooler=pooler,
        text_len=load_text_length(folder, decoder.max_position_embeddings) if folder and is_encoder else None,
        num_encoder_caches=decoder.num_caches if is_encoder else 0,
    )


def build_input_processor(config: EngineConfig, decoder: DecoderConfig, folder: Path) -> InputProcessor:
    """The front end of a model in `folder`. `config` is resolved."""
    tokenizer_folder = find_tokenizer_folder(config, folder)
    numbers = embed_numbers_of(decoder)
    return load_input_processor(
        config, decoder.vocab_size, folder, tokenizer_folder, embed_numbers=numbers, local_files=True
    )


def embed_numbers_of(decoder: DecoderConfig) -> int:
    """Numbers of an embedding of a picture, all levels; 0 where nothing is seen."""
    return 0 if decoder.vision is None else decoder.vision.embed_numbers


def find_tokenizer_folder(config: EngineConfig, folder: Path) -> Path:
    """Where the tokenizer of a model in `folder` is. `config` is resolved."""
    options = config.model
    if options.tokenizer == options.model:
        return folder
    return resolve_model_folder(options.tokenizer, None, config.load.download_dir)
