"""The options of the server: what `jaxpaged serve` takes besides those of the engine.

Declared like engine options, so that flags are made from them. This module knows no framework.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.config.option_checks import checked, option
from jaxpaged.config.vllm_options import without_neutral
from jaxpaged.engine.observability.log_setup import FORMATS, LEVELS
from jaxpaged.errors import ConfigError
from jaxpaged.parsing.parser import BUILT_IN, Formats, reasoning_format_named, tool_format_named
from jaxpaged.serving.foreign_options import FOREIGN_SERVER_OPTIONS


@dataclass(frozen=True)
class ServerOptions:
    """Where to listen, who may ask, and how much."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 means every interface", not_empty=True)
    port: int = option(8000, "port to listen on; 0 takes any free one", minimum=0, maximum=65535)
    admin_port: int | None = option(
        None,
        "port of the admin endpoints (sleep, reset_prefix_cache, ...), which listen on 127.0.0.1 only (default: none)",
        minimum=0,
        maximum=65535,
    )
    uds: str | None = option(
        None,
        "path of a Unix socket that replaces host and port; whoever may use the file may send requests",
        not_empty=True,
    )
    root_path: str = option("", "path under which a proxy publishes the server, such as /llm")
    ssl_certfile: str | None = option(
        None,
        "file with the server's certificate (PEM); it switches on HTTPS",
        not_empty=True,
    )
    ssl_keyfile: str | None = option(
        None,
        "file with the certificate's key, where that is a file of its own",
        not_empty=True,
    )
    ssl_ca_certs: str | None = option(
        None,
        "file with the authorities (PEM) that sign the clients' certificates",
        not_empty=True,
    )
    ssl_cert_reqs: int = option(
        0,
        "client certificates: 0 not asked for, 1 checked if sent, 2 required",
        minimum=0,
        maximum=2,
    )
    http: bool = option(True, "serve over HTTP; --no-http leaves gRPC only")
    grpc_port: int | None = option(
        None,
        "port of the gRPC server on the same --host (extra grpc; default: none)",
        minimum=0,
        maximum=65535,
    )
    grpc_uds: str | None = option(None, "path of a Unix socket for the gRPC server", not_empty=True)
    grpc_admin_key_file: str | None = option(
        None, "file with one key a line for the gRPC service Admin; without it nobody may call that service"
    )
    page: bool = option(True, "serve a web page at / with a playground and a view of the engine")
    served_model_name: tuple[str, ...] | None = option(
        None,
        "names that requests may use for the model; answers use the first",
        not_empty=True,
    )
    allowed_origins: tuple[str, ...] = option(
        (), "origins whose pages may call the API from a browser, such as https://my.site; * means all"
    )
    api_key: tuple[str, ...] = option((), "keys, one of which every client must send", not_empty=True)
    api_key_file: str | None = option(
        None, "file with one key a line; unlike --api-key it does not appear in the list of processes"
    )
    max_body_bytes: int | None = option(
        None, "largest request body in bytes (default: 16 MiB, and 64 MiB for a model that takes pictures)", minimum=1
    )
    max_header_bytes: int = option(64 * 2**10, "largest request line and headers in bytes", minimum=1024)
    max_connections: int = option(
        4096,
        "most HTTP connections at a time, and as many of gRPC; beyond that, the one that has been idle longest "
        "is closed",
        minimum=1,
    )
    max_num_queued_reqs: int | None = option(
        None,
        "most sequences that wait for the engine; further requests get 429 (default: no limit)",
        minimum=0,
    )
    max_num_queued_tokens: int | None = option(
        None,
        "most prompt tokens that wait for the engine; further requests get 429 (default: no limit)",
        minimum=0,
    )
    max_sequences_per_request: int = option(2048, "most sequences of one request: its prompts times n", minimum=1)
    max_answer_bytes: int = option(
        256 * 2**20,
        "largest answer in bytes, estimated from max_tokens, n and log probabilities; streams have no such limit",
        minimum=1,
    )
    shutdown_timeout: float = option(
        30.0,
        "seconds that running requests get after SIGTERM; a second signal ends them at once",
        minimum=0,
    )
    enable_prompt_tokens_details: bool = option(
        False, "report cached prompt tokens in usage; this tells clients what others have asked"
    )
    enable_force_include_usage: bool = option(False, "send usage with every chunk of a stream and at its end")
    enable_request_id_headers: bool = option(False, "send the header X-Request-Id with every answer")
    tool_call_parser: str | None = option(
        None,
        "format in which the model writes tool calls, by vLLM's name: hermes, llama3_json, mistral, ... "
        "(default: what the chat template shows)",
        not_empty=True,
    )
    enable_auto_tool_choice: bool = option(
        False,
        "let the model decide whether to call tools, and find the calls in its text; --tool-call-parser implies it",
    )
    reasoning_parser: str | None = option(
        None,
        "format in which the model marks its thinking, by vLLM's name: qwen3, deepseek_r1, ... (default: "
        "thinking is part of the content)",
        not_empty=True,
    )
    lora_modules: tuple[Any, ...] = option(
        (),
        "adapters to load at the start, each as NAME=PATH or as JSON with name, path and base_model_name; requests "
        "name them as their model. Guide: guides/lora.md",
        several=True,
    )
    allowed_lora_dirs: tuple[str, ...] = option(
        (),
        "folders from which /v1/load_lora_adapter on the admin port may load adapters while the server runs (default: "
        "none, and there is no such endpoint)",
        several=True,
    )
    lora_resolver_dir: str | None = option(
        None,
        "folder in which an adapter is looked for by the model name of a request: DIR/NAME/adapter_config.json",
        not_empty=True,
    )
    lora_resolver_repos: tuple[str, ...] = option(
        (), "ids of adapters on the hub that are downloaded when a request names them", several=True
    )
    allowed_weight_dirs: tuple[str, ...] = option(
        (),
        "folders from which /update_weights on the admin port may read weights that a trainer wrote (default: none, "
        "and weights do not change by HTTP). Guide: guides/weight_updates.md",
        several=True,
    )
    allowed_weight_hosts: tuple[str, ...] = option(
        (),
        "hosts from which /update_weights on the admin port may pull weights that a trainer offers, as its address "
        "names them (default: none). Guide: guides/weight_updates.md",
        several=True,
    )
    max_stored_responses: int = option(
        1000,
        "most responses of /v1/responses kept in memory; the oldest go first, and 0 keeps none",
        minimum=0,
    )
    max_stored_response_bytes: int = option(256 * 2**20, "most bytes of responses kept in memory", minimum=1)
    default_chat_template_kwargs: dict[str, Any] = option(
        {}, "variables for the chat template, as JSON such as '{\"enable_thinking\": false}'; a request's own win"
    )
    trust_request_chat_template: bool = option(False, "accept chat templates from requests")
    trust_request_mm_kwargs: bool = option(
        False, "accept mm_processor_kwargs and media_io_kwargs from requests: how their pictures are processed"
    )
    sse_keep_alive_interval: float = option(
        0.0,
        "seconds of silence after which a stream sends a comment, so that proxies keep it open; 0 sends none",
        minimum=0,
    )
    step_timeout: float = option(
        300.0,
        "seconds without a sign of life after which the engine's process is replaced",
        above=0,
    )
    max_restarts: int = option(
        5,
        "most replacements of a dead or hung engine within an hour; after that /health answers 503",
        minimum=0,
    )
    ready_when: str = option(
        "compiled",
        "when /ready turns 200: 'compiled' waits for all programs of ordinary requests, 'serving' does not",
        choices=("compiled", "serving"),
    )
    access_log: bool = option(True, "log path, status, id and duration of each request; bodies are never logged")
    disable_access_log_for_endpoints: tuple[str, ...] = option(
        (), "paths whose requests are not logged, such as /v1/models,/metrics"
    )
    log_level: str = option("info", "lowest level of the messages on standard error", choices=LEVELS)
    log_format: str = option("text", "write log lines as text or as JSON objects", choices=FORMATS)

    @classmethod
    def from_options(
        cls, options: Mapping[str, Any], load_formats: Callable[[], Formats] = lambda: BUILT_IN
    ) -> "ServerOptions":
        """`load_formats` is asked where a parser has a name that is not built in. Raises ConfigError for values out of
        range and for unknown parsers."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        own = without_neutral(options, FOREIGN_SERVER_OPTIONS)
        made = cls(**{name: checked(fields[name], value) for name, value in own.items()})
        if made.root_path and (not made.root_path.startswith("/") or made.root_path.endswith("/")):
            raise ConfigError(f"root_path is {made.root_path!r}; it must begin with a slash and not end with one.")
        check_template_variables(made.default_chat_template_kwargs)
        if made.lora_modules:
            from jaxpaged.serving.lora_modules import lora_modules  # which --help need not wait for

            lora_modules(made.lora_modules)
        pairs = (made.tool_call_parser, BUILT_IN.tools), (made.reasoning_parser, BUILT_IN.reasoning)
        check_formats(made, BUILT_IN if all(name is None or name in names for name, names in pairs) else load_formats())
        return made


def check_formats(options: ServerOptions, known: Formats) -> None:
    """Raise ConfigError for a parser that nobody knows."""
    if options.tool_call_parser is not None:
        tool_format_named(options.tool_call_parser, known)
    if options.reasoning_parser is not None:
        reasoning_format_named(options.reasoning_parser, known)


OF_ADAPTERS = ("lora_modules", "allowed_lora_dirs", "lora_resolver_dir", "lora_resolver_repos")


def check_adapters(options: ServerOptions, enable_lora: bool) -> None:
    """Raise ConfigError for options about adapters where the engine takes none."""
    for name in OF_ADAPTERS:
        if not enable_lora and getattr(options, name):
            raise ConfigError(f"{name} is given, but the engine takes no adapters. Give enable_lora too.")


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Raise ConfigError for variables of a chat template that every chat sets itself."""
    if variables:
        from jaxpaged.engine.input.chat_template import OWN_VARIABLES  # with jinja, for which --help need not wait

        if bad := OWN_VARIABLES & variables.keys():
            raise ConfigError(f"default_chat_template_kwargs sets {min(bad)}, which every chat has. Leave it out.")
