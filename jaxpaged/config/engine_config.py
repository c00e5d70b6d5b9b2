"""All options of an engine as one value."""

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.config.lora import LoRAConfig
from jaxpaged.config.multimodal import MultiModalConfig
from jaxpaged.config.option_checks import checked
from jaxpaged.config.plugin_options import PluginConfig
from jaxpaged.config.resolution import (
    ModelFacts,
    check_deterministic,
    check_experts,
    check_offload,
    check_processes,
    check_ranks,
    check_routed_experts,
    check_sizes,
    check_stages,
    for_encoder,
    for_encoder_only,
    for_pooling,
    resolved_cache,
    resolved_model,
    resolved_scheduler,
    settled,
    with_whole_prompts,
)
from jaxpaged.config.sections import (
    CacheConfig,
    CompileConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    ProfilerConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from jaxpaged.config.speculation import resolved_speculation
from jaxpaged.config.vllm_options import FOREIGN_OPTIONS, without_neutral
from jaxpaged.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class EngineConfig:
    """All options, by topic."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    multimodal: MultiModalConfig = field(default_factory=MultiModalConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    plugins: PluginConfig = field(default_factory=PluginConfig)

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """Build from flat keywords, of which None means that it was not given; `vllm_options` says which others of
        vLLM's pass. Raises ConfigError for unknown names and for values out of range."""
        given: dict[str, dict[str, Any]] = {}
        owners = {f.name: (section, f) for section, f in all_options()}
        for name, value in without_neutral(options).items():
            if name not in owners:
                raise ConfigError(f"unknown option {name!r}.{did_you_mean(name, [*owners, *FOREIGN_OPTIONS])}")
            section, f = owners[name]
            given.setdefault(section, {})[name] = checked(f, value)
        return cls(**{section: kind(**given[section]) for section, kind in section_types().items() if section in given})

    @property
    def max_model_len(self) -> int:
        """Of a resolved config: tokens of a prompt and its answer, at most."""
        return settled(self.model.max_model_len)

    @property
    def code_places(self) -> tuple[str, ...]:
        """Where options, besides those that name plugins, say that code is: 'module:NAME'."""
        compile = self.compile
        named = compile.attention_backend, compile.recurrence_backend, self.plugins.worker_extension_cls
        return tuple(place for place in named if place is not None and ":" in place)

    def options(self) -> dict[str, Any]:
        """Every option by its name: `from_options` makes an equal config of them."""
        return {f.name: getattr(getattr(self, section), f.name) for section, f in all_options()}

    def resolve(self, facts: ModelFacts, platform: str) -> "EngineConfig":
        """Settle what model and platform decide. Raises ConfigError where options contradict each other."""
        model = resolved_model(self.model, facts, platform)
        cache = resolved_cache(self.cache, model, self.parallel, facts, platform)
        scheduler = with_whole_prompts(self.scheduler, facts)
        scheduler = resolved_scheduler(scheduler, self.compile, settled(model.max_model_len), platform)
        speculation = self.speculative.speculative_config
        num_devices = self.parallel.tensor_parallel_size
        speculative = SpeculativeConfig(resolved_speculation(speculation, model.runner, num_devices, model.model))
        check_sizes(model, scheduler, self.compile, self.parallel, facts)
        check_processes(self.compile, self.parallel, platform)
        check_experts(self.parallel, facts)
        check_routed_experts(self.model, self.cache, self.parallel, facts)
        check_deterministic(self.compile, self.parallel, facts, platform)
        check_offload(model, cache, self.parallel, self.compile)
        sections = cache, self.parallel, scheduler, self.compile
        check_stages(*sections, self.load.load_format, speculative.num_drafts)
        check_ranks(cache, self.parallel, speculative.num_drafts)
        if model.runner == "pooling":
            cache, scheduler = for_pooling(model, cache, scheduler, self.compile, facts)
            cache = for_encoder(cache, self.parallel, scheduler, facts)
        if self.multimodal.mm_encoder_only:
            cache, scheduler = for_encoder_only(model, cache, scheduler, speculative.num_drafts)
        return dataclasses.replace(self, model=model, cache=cache, scheduler=scheduler, speculative=speculative)


def section_types() -> dict[str, type[Any]]:
    """The class of every section, by the section's name."""
    return typing.get_type_hints(EngineConfig)


def all_options() -> list[tuple[str, dataclasses.Field]]:
    """(section name, field) of every option, in order of declaration."""
    return [(name, f) for name, section in section_types().items() for f in dataclasses.fields(section)]
