"""What all endpoints share: the engine, the model as clients know it, the options, and what is under way."""

import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.config import EngineConfig
from jaxpaged.engine.early_leases import let_go
from jaxpaged.engine.observability.metrics import Metric
from jaxpaged.errors import ConfigError
from jaxpaged.messages import LoRAInfo
from jaxpaged.plugins.loading import load_plugins
from jaxpaged.serving.adapter_resolvers import FolderResolver, HubResolver, LoRAResolver
from jaxpaged.serving.adapters import ServedAdapters
from jaxpaged.serving.admission import Pace, Traffic
from jaxpaged.serving.engine_client import Engine
from jaxpaged.serving.errors import ErrorKind, ServingError
from jaxpaged.serving.formats import formats_of
from jaxpaged.serving.grammar_checks import GrammarChecks
from jaxpaged.serving.lora_modules import lora_modules
from jaxpaged.serving.options import ServerOptions, check_adapters
from jaxpaged.serving.prompts import PromptReader, output_formats
from jaxpaged.serving.requests import check_depth

MAX_BODY_BYTES, MAX_BODY_BYTES_WITH_PICTURES = 16 << 20, 64 << 20
"""Where no option says how long a request may be; pictures in base64 are long."""
MOST_NAMED = 20
"""Names that are told to a client whose model is none of them."""
COUNTED_CONTEXTS = 8
"""Texts whose tokens are only counted may be longer than the model takes, so many times."""


@dataclass(frozen=True)
class ServedModel:
    """The model as clients know it. The first of `names` is its own; `aliases` are accepted but not shown."""

    names: tuple[str, ...]
    max_model_len: int
    max_num_seqs: int
    aliases: tuple[str, ...] = ()
    cache_labels: dict[str, str] = field(default_factory=dict)  # of the metric vllm:cache_config_info
    created: int = field(default_factory=lambda: int(time.time()))


def served_model(config: EngineConfig, names: tuple[str, ...] | None) -> ServedModel:
    """The model of a resolved configuration. One that lies in a folder is called like the folder, not by its path."""
    given = config.model.model
    cache = config.cache
    return ServedModel(
        names=names or (re.split(r"[/\\]", given.rstrip("/\\"))[-1] if is_path(given) else given,),
        max_model_len=config.model.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        aliases=() if names else (given,),
        cache_labels={
            "block_size": str(cache.block_size),
            "cache_dtype": cache.kv_cache_dtype,
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "num_gpu_blocks": str(cache.num_gpu_blocks_override),
        },
    )


def served_adapters(
    engine: Engine, model: ServedModel, options: ServerOptions, further: Iterable[LoRAResolver] = ()
) -> ServedAdapters | None:
    """The adapters of a server, none of which is loaded yet; None where the engine takes none. `further`: resolvers
    that are asked after those of the options. Raises ConfigError."""
    check_adapters(options, engine.config.lora.enable_lora)
    if not engine.config.lora.enable_lora:
        return None
    modules, names = lora_modules(options.lora_modules), (*model.names, *model.aliases)
    for module in modules:
        if module.name in names:
            raise ConfigError(f"lora_modules has the name {module.name!r}, which the model has. Give another one.")
    base = engine.config.model.model
    resolvers: list[LoRAResolver] = []
    if options.lora_resolver_dir is not None:
        resolvers.append(FolderResolver(options.lora_resolver_dir, names))
    if options.lora_resolver_repos:
        resolvers.append(HubResolver(options.lora_resolver_repos))
    return ServedAdapters(
        engine,
        base,
        names,
        modules=modules,
        resolvers=[*resolvers, *further],
        folders=options.allowed_lora_dirs,
        repos=options.lora_resolver_repos,
    )


def is_path(model: str) -> bool:
    """Whether a model's name is a folder's path; hub ids have one slash inside."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model


class Service:
    """The shared parts, and the checks that every generating endpoint makes.

    Raises ConfigError when an option does not fit the model.
    """

    def __init__(self, engine: Engine, model: ServedModel, options: ServerOptions):
        self.engine = engine
        self.model = model
        self.options = options
        self.prompts = PromptReader(engine.input_processor, options.default_chat_template_kwargs)
        self.plugins = load_plugins(engine.config.plugins.plugin, engine.config.plugins.plugins)
        self.formats = output_formats(options, engine.input_processor.chat_templates, formats_of(self.plugins))
        self.most_counted = COUNTED_CONTEXTS * model.max_model_len
        self.takes_pictures = engine.input_processor.pictures is not None
        self.max_body_bytes = options.max_body_bytes or (
            MAX_BODY_BYTES_WITH_PICTURES if self.takes_pictures else MAX_BODY_BYTES
        )
        self.pace = Pace()
        self.grammars = GrammarChecks(engine.input_processor.grammar_checker)
        self.has_been_ready = False  # at some time since the start
        self.adapters = served_adapters(engine, model, options, self.plugins.added("lora_resolvers").values())
        self.sources: list[Callable[[], list[Metric]]] = []  # of metrics, besides the engine
        self.traffic = Traffic(
            model.max_num_seqs,
            options.max_num_queued_reqs,
            options.max_num_queued_tokens,
            max_sequences=options.max_sequences_per_request,
            max_answer_bytes=options.max_answer_bytes,
        )

    @property
    def is_tracing(self) -> bool:
        """Whether requests are traced: only then does the engine take trace headers."""
        return self.engine.config.observability.otlp_traces_endpoint is not None

    async def let_go(self, kv_transfer_params: Any) -> None:
        """A request with these is refused, or given up: what another engine lends for it is given back."""
        if kv_transfer_params:
            await let_go(self.engine.call, kv_transfer_params)

    @property
    def picture_threads(self) -> Executor:
        """In which requests with pictures are prepared, of a model that takes them: they wait long, for other servers
        and for processes that decode, and texts are not to wait behind them."""
        return self.engine.input_processor.pictures.threads

    def check_picture_options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Those of `mm_processor_kwargs` and `media_io_kwargs` that a request has. Raises ServingError unless it may
        have some."""
        wanted = {name: value for name, value in given.items() if value}
        for name, value in wanted.items():
            if not self.takes_pictures:
                raise ServingError(f"{name} is given, but the model takes text only. Leave it out.", name)
            if not self.options.trust_request_mm_kwargs:
                raise ServingError(
                    f"{name} is given, but this server processes all pictures alike. Leave it out, or start the server "
                    "with --trust-request-mm-kwargs.",
                    name,
                )
            if not isinstance(value, dict):
                raise ServingError(f"{name} must be an object. Correct it.", name)
            check_depth(name, value)
        return wanted

    def obstacle(self) -> str | None:
        """Why new requests should go elsewhere."""
        return "The server is shutting down." if self.traffic.draining else self.engine_obstacle()

    def engine_obstacle(self) -> str | None:
        """The same without regard to the server."""
        obstacle = self.engine.obstacle(self.options.ready_when == "compiled")
        if obstacle is None and self.adapters is not None:
            obstacle = self.adapters.obstacle()
        if obstacle is None:
            self.has_been_ready = True
        return obstacle

    def close(self) -> None:
        """End the threads."""
        self.grammars.close()

    def count_tokens(self, text: str) -> int:
        """Tokens of a text that stands alone."""
        return len(self.engine.input_processor.tokenizer.encode(text, False)) if text else 0

    async def asked_model(self, name: str | None) -> tuple[str, LoRAInfo | None]:
        """The name under which the response goes out, and the adapter that has it, if it is one's. Raises ServingError
        for another model's name, and for an adapter that cannot be loaded."""
        if self.adapters is None or not name or name in self.model.names or name in self.model.aliases:
            return self.check_model(name), None
        lora = await self.adapters.find(name)
        return (self.check_model(name) if lora is None else name), lora

    def check_model(self, name: str | None) -> str:
        """The name of the model itself under which the response goes out. Raises ServingError for another's."""
        if not name:
            return self.model.names[0]
        if name in self.model.names:
            return name
        if name in self.model.aliases:
            return self.model.names[0]
        names = (*self.model.names, *(each.info.lora_name for each in self.adapters or ()))
        more = f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
        known = ", ".join(repr(each) for each in names[:MOST_NAMED]) + more
        raise ServingError(
            f"The model {name!r} does not exist. This server has {known}.", "model", kind=ErrorKind.NOT_FOUND
        )
