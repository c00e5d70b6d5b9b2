"""What a compiled program depends on, as plain named values: two equal fingerprints mean the same programs.

Everything counts until it is known not to: all options but those in `NOT_COMPILED_IN`, all of the model's description,
every source file from which programs are traced or their arguments are packed, and the compiler with its flags.
This module does not know where fingerprints are kept.
"""

import functools
import hashlib
import inspect
import os
import platform
import re
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh

import pallas_kernels
from jaxpaged.config import EngineConfig, all_options
from jaxpaged.config.plugin_options import PluginConfig
from jaxpaged.models.config import DecoderConfig
from jaxpaged.plugins.loading import digests, plugin_files
from jaxpaged.sampling.custom import CustomProcessors

Fingerprint = dict[str, Any]
"""Name -> a text, a number, or a list of texts. Names are dotted: "model.hidden_size"."""

NOT_COMPILED_IN = frozenset(
    """
    model hf_overrides tokenizer skip_tokenizer_init revision seed generation_config override_generation_config
    chat_template
    gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override enable_prefix_caching
    kv_cache_scales
    kv_events_config kv_offload kv_offload_secrets kv_transfer_config kv_role kv_address kv_peers kv_lease_seconds
    kv_transport kv_ssl_certfile kv_ssl_keyfile kv_ssl_ca_certs
    otlp_traces_endpoint data_parallel_size
    limit_mm_per_prompt media_io_kwargs mm_processor_cache_gb mm_bytes_in_flight_gb num_media_processes
    disable_chunked_mm_input interleave_mm_strings allowed_local_media_path allowed_media_domains
    scheduling_policy enable_chunked_prefill long_prefill_token_threshold async_scheduling stream_interval
    num_short_request_rows
    distributed_executor_backend nnodes node_rank master_addr master_port distributed_timeout_seconds group_secret_file
    load_format download_dir compilation_cache_dir bundle wait_for_programs profile_dir
    token_buckets attention_backend recurrence_backend logits_processors speculative_config eplb_config
    ec_transfer_config enable_mm_embeds plugin plugins worker_extension_cls queue_policy io_processor_plugin
    """.split()
)
"""Options that no program depends on, and, in the last lines, those that count as what they were resolved to."""

SOURCES = ("kv_cache_spec.py", "sampling_params/features.py", "sampling_params/limits.py")
TRACED = (
    "layers",
    "models",
    "params",
    "sampling",
    "worker.cache",
    "worker.engine_spec",
    "worker.programs.declare",
    "worker.programs.engine_programs",
    "worker.step",
)
"""Modules with what is traced; others of these folders are around it."""
SOURCE_FOLDERS = ("layers", "models", "params", "sampling", "worker")
CPU_FEATURES = re.compile(
    r"(sse|ssse|avx|amx|fma|bmi|f16c|adx|popcnt|abm|aes|vaes|vpclmul|gfni|sha|asimd|sve|sme|bf16|i8mm|atomics)\w*"
)

GENERATED = ("<string>", "<frozen ")
"""What Python names in place of the file of a function that itself or a library has written, as for dataclasses."""
WRAPPINGS = ("__func__", "fget", "func", "__wrapped__")
"""Where methods, properties, partial and decorated functions have what they wrap."""
MOST_WRAPPINGS = 20


def fingerprint(
    config: EngineConfig,
    model: Any,
    decoder: DecoderConfig,
    mesh: Mesh,
    params: Any,
    custom: CustomProcessors,
    resolved: Mapping[str, Any],
) -> Fingerprint:
    """`config` and `decoder` are resolved, `model` is the record of its functions, `params` are shapes. `resolved` is
    what else programs are made for."""
    values = {
        "versions.jax": jax.__version__,
        "versions.jaxlib": jaxlib.__version__,
        **named(
            "options",
            {
                option.name: getattr(getattr(config, section), option.name)
                for section, option in all_options()
                if option.name not in NOT_COMPILED_IN
            },
        ),
        **named("options", resolved),
        **named("model", {**asdict(decoder), "layers": [f"{i}: {layer}" for i, layer in enumerate(decoder.layers)]}),
        **named("device", device(mesh)),
        **named("jax", jax_options()),
        **named("logits_processors", {source_name(type(p)): source_digest(type(p)) for p in custom.processors}),
        **named("source", source_files()),
        **named("plugin", plugin_code(config.plugins, model)),
        "parameters": digest(str(jax.tree.flatten(params)).encode()),  # last: others say more of a difference
    }
    return {name: plain(value) for name, value in values.items()}


def difference(before: Fingerprint, now: Fingerprint) -> str | None:
    """The first field that differs and its two values, in words; None when all are equal."""
    for name in [*before, *(name for name in now if name not in before)]:
        old, new = before.get(name, "missing"), now.get(name, "missing")
        if old == new:
            continue
        if isinstance(old, list) and isinstance(new, list):
            gone, added = sorted(set(old) - set(new)), sorted(set(new) - set(old))
            return f"{name} has {' '.join(gone) or 'nothing more'} there and {' '.join(added) or 'nothing more'} here"
        return f"{name} is {old} there and {new} here"
    return None


# ---- parts ---------------------------------------------------------------------------------------


def device(mesh: Mesh) -> dict[str, Any]:
    """Devices, their runtime (libtpu, CUDA), and on a CPU the instructions that it has."""
    first = mesh.devices.flat[0]
    values = {
        "platform": first.platform,
        "kind": first.device_kind,
        # A client for a topology without devices leaves the first line out.
        "runtime": first.client.platform_version.removeprefix("PJRT C API\n"),
        "mesh": " ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
    }
    return values | ({"cpu": platform.machine(), "cpu_features": cpu_features()} if first.platform == "cpu" else {})


def cpu_features() -> list[str]:
    """Instruction sets of this CPU that a compiler may use, where the system tells (Linux)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return [platform.processor()]
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return sorted(word for word in set(line[1].split()) if CPU_FEATURES.fullmatch(word)) if line else []


def jax_options() -> dict[str, Any]:
    """Settings of the process that change what jax traces or XLA compiles."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        "enable_x64": jax.config.jax_enable_x64,
        "default_matmul_precision": jax.config.jax_default_matmul_precision,
        "xla_flags": " ".join(sorted(flag for flag in flags if "host_platform_device_count" not in flag)),
        "libtpu_init_args": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }


def source_files() -> dict[str, str]:
    """Path -> digest of every source file that programs, or the packing of their arguments, come from."""
    root, kernels = Path(__file__).parents[2], Path(pallas_kernels.__file__).parent
    files = [*(root / name for name in SOURCES), *kernels.rglob("*.py"), *kernels.rglob("*.json")]
    for folder in SOURCE_FOLDERS:
        files += (root / folder).rglob("*.py")
    return {path.relative_to(root.parent).as_posix(): digest(path.read_bytes()) for path in sorted(files)}


def source_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def source_digest(cls: type) -> str:
    """Of the whole file of a class, since its methods may call what lies beside it."""
    try:
        return digest_of(Path(inspect.getfile(cls)))
    except (OSError, TypeError):
        return "unknown"


# ---- what no file says ---------------------------------------------------------------------------


def replaced_code(*objects: Any, plugins: Iterable[Path] = ()) -> list[str]:
    """Names of functions from which programs are traced, and whose source is in none of the files that count here:
    somebody has put them into a module, a class or one of `objects`, a model for example. A fingerprint knows nothing
    of them. `plugins`: files that count, too."""
    known = known_code() + tuple(str(path.resolve()) for path in plugins)
    ours = tuple(f"jaxpaged.{module}" for module in TRACED) + (pallas_kernels.__name__,)
    modules = [module for name, module in tuple(sys.modules.items()) if name.startswith(ours)]
    classes = {item for module in modules for item in tuple(vars(module).values()) if isinstance(item, type)}
    own_classes = [cls for cls in classes if cls.__module__.startswith(ours)]
    return sorted(
        f"{getattr(place, '__qualname__', getattr(place, '__name__', type(place).__name__))}.{name}"
        for place in (*modules, *own_classes, *objects)
        for name, value in tuple(vars(place).items())
        if not all((file or "").startswith(known) for file in sources_of(value))
    )


def known_code() -> tuple[str, ...]:
    """How the files begin whose code counts by itself, or by a library's version."""
    root, kernels = Path(__file__).parents[2], Path(pallas_kernels.__file__).parent
    libraries = (Path(os.__file__).parent, Path(jax.__file__).parents[1])  # Python's, and those beside jax
    return tuple(f"{folder}{os.sep}" for folder in (root, kernels, *libraries)) + GENERATED


def plugin_code(options: PluginConfig, model: Any) -> dict[str, str]:
    """Name -> digest of plugins; and path -> digest of the files of a model's functions that count nowhere else, such
    as those of a model that a script has registered."""
    known = known_code() + tuple(str(path.resolve()) for path in plugin_files(options.plugin, options.plugins))
    files = {file or "unknown" for value in vars(model).values() for file in sources_of(value)}
    others = {file: digest_of(Path(file)) for file in sorted(files) if not file.startswith(known)}
    return {**digests(options.plugin, options.plugins), **others}


def digest_of(path: Path) -> str:
    try:
        return digest(path.read_bytes())
    except OSError:
        return "unknown"


def sources_of(value: Any) -> list[str | None]:
    """`source_of` a function, and of those that a partial one is given."""
    if not isinstance(value, functools.partial):
        return [source_of(value)]
    return [file for each in (value.func, *value.args, *value.keywords.values()) for file in sources_of(each)]


def source_of(value: Any) -> str | None:
    """The file of a function, however wrapped, or of what is called like one; of anything else a name that is known.
    None where wrappings have no end, as those of a test's mock, which has every attribute that it is asked for."""
    for _ in range(MOST_WRAPPINGS):
        if isinstance(value, type):
            break
        inner = next((getattr(value, name) for name in WRAPPINGS if getattr(value, name, None) is not None), None)
        if inner is None:
            break
        value = inner
    else:
        return None
    code = None
    if callable(value) and not isinstance(value, type):
        code = getattr(value, "__code__", None) or getattr(type(value).__call__, "__code__", None)
    return code.co_filename if isinstance(code, types.CodeType) else GENERATED[0]


# ---- values --------------------------------------------------------------------------------------


def named(section: str, values: Mapping[str, Any]) -> Fingerprint:
    return {f"{section}.{name}": value for name, value in values.items()}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def plain(value: Any) -> Any:
    """As JSON gives it back: numbers and texts as they are, lists of texts, and the text of anything else."""
    if value is None or isinstance(value, str | int | float):
        return value
    return [str(item) for item in value] if isinstance(value, list) else str(value)
