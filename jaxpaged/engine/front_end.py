"""Puts the front end of a model together from files: tokenizer, chat templates, default sampling parameters.

A process that has the engine core in another one needs nothing else of the model. This module imports no jax, and does
not know how a model's name becomes a folder.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.config import EngineConfig
from jaxpaged.engine.input.chat_template import load_chat_templates
from jaxpaged.engine.input.generation_config import load_generation_defaults
from jaxpaged.engine.input.no_tokenizer import NoTokenizer
from jaxpaged.engine.input.processor import TEXT_ONLY, InputProcessor
from jaxpaged.engine.input.queue_policy import queue_policy_of
from jaxpaged.engine.input.tokenizer import check_vocabulary, load_tokenizer
from jaxpaged.engine.observability.stat_loggers import StatLoggers, stat_loggers
from jaxpaged.engine.pooling.io_processor import io_processor_of
from jaxpaged.engine.pooling.pooler import load_pooler
from jaxpaged.engine.process.wire import CoreFacts
from jaxpaged.errors import ConfigError, how_to_install, is_installed
from jaxpaged.multimodal.checkpoint import model_identity, picture_configs
from jaxpaged.plugins.loading import load_plugins

if TYPE_CHECKING:
    from jaxpaged.engine.input.pictures import PictureIntake


def front_end(facts: CoreFacts) -> tuple[EngineConfig, InputProcessor]:
    """The resolved options of a core in another process, and what makes requests for it."""
    config = EngineConfig.from_options(**facts.options)
    folders = Path(facts.model_folder), Path(facts.tokenizer_folder)
    return config, load_input_processor(config, facts.vocab_size, *folders, embed_numbers=facts.embed_numbers)


def front_end_with_loggers(facts: CoreFacts) -> tuple[EngineConfig, InputProcessor, list[StatLoggers]]:
    """`front_end`, and the stat loggers of plugins. Raises ConfigError for a plugin that cannot be loaded."""
    config, input_processor = front_end(facts)
    plugins = load_plugins(config.plugins.plugin, config.plugins.plugins)
    return config, input_processor, stat_loggers(plugins.added("stat_loggers"), config)


def load_input_processor(
    config: EngineConfig,
    vocab_size: int,
    model_folder: Path,
    tokenizer_folder: Path,
    *,
    embed_numbers: int = 0,
    local_files: bool = False,
) -> InputProcessor:
    """`config` is resolved; `vocab_size` is the model's, and `embed_numbers` how many an embedding of a picture has, if
    it sees. `local_files`: whoever calls may name pictures by their paths. Raises CheckpointError or ConfigError."""
    options = config.model
    tokenizer: Any  # `NoTokenizer` refuses whatever it is asked
    if options.skip_tokenizer_init:
        if options.chat_template is not None:
            raise ConfigError("skip_tokenizer_init and chat_template are given, but chats are text. Leave one out.")
        tokenizer, templates, tokenizer_config = NoTokenizer(), None, dict[str, Any]()
    else:
        tokenizer = load_tokenizer(tokenizer_folder)
        check_vocabulary(tokenizer, vocab_size)
        tokenizer_config = tokenizer.config
        templates = load_chat_templates(tokenizer_folder, tokenizer.config, options.chat_template)
    pictures, why_none = load_pictures(config, tokenizer, model_folder, embed_numbers, local_files)
    return InputProcessor(
        tokenizer,
        vocab_size=vocab_size,
        max_model_len=config.max_model_len,
        max_logprobs=options.max_logprobs,
        seed=options.seed,
        stream_interval=config.scheduler.stream_interval,
        allow_priority=config.scheduler.scheduling_policy == "priority",
        defaults=load_generation_defaults(model_folder, options.generation_config, options.override_generation_config),
        pooler=load_pooler(options, model_folder, tokenizer_config) if options.runner == "pooling" else None,
        chat_templates=templates,
        kv_peers=(config.cache.role, config.cache.kv_peers),
        pictures=pictures,
        why_no_pictures=why_none,
        queue_policy=queue_policy_of(config),
        io_processor=io_processor_of(config),
        replays=options.enable_trace_replay,
        returns_masks=options.return_sampling_mask,
        tells_experts=options.enable_return_routed_experts,
    )


def load_pictures(
    config: EngineConfig, tokenizer: Any, folder: Path, embed_numbers: int, local_files: bool
) -> "tuple[PictureIntake | None, str]":
    """What processes pictures for a model that sees, or None, and why there can be none. Raises CheckpointError for a
    processor that cannot be read, ConfigError for options that it does not take."""
    if config.model.runner == "pooling":
        return None, "pictures are not pooled"
    configs = picture_configs(folder, config.model.hf_overrides)
    if configs is None:
        return None, TEXT_ONLY
    why = None
    if config.multimodal.language_model_only and not config.multimodal.enable_mm_embeds:
        why = "the engine was started with language_model_only"
    elif config.model.skip_tokenizer_init:
        why = "the engine was started with skip_tokenizer_init"
    elif not is_installed("PIL"):
        why = f"pictures need Pillow, which is not installed where the engine runs: {how_to_install('vision')}"
    if why is not None:
        return None, why
    from jaxpaged.engine.input.pictures import PictureIntake  # with all that fetches and decodes

    identity = model_identity(folder, configs)
    embeds = None
    if config.multimodal.enable_mm_embeds:
        from jaxpaged.multimodal.embeddings import form_of

        embeds = form_of(embed_numbers, config.model.dtype)
    num_cores = 0 if local_files else config.parallel.num_cores
    intake = PictureIntake(
        tokenizer,
        config.multimodal,
        identity,
        configs.model,
        configs.processor,
        local_files=local_files,
        embeds=embeds,
        kept_elsewhere=num_cores and num_cores * config.multimodal.core_cache_bytes(num_cores),
    )
    return intake, ""
