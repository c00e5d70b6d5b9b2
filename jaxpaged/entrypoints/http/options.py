"""The options of the server: what `jaxpaged serve` takes besides those of the engine.

Declared like engine options, so that flags are made from them. This module knows no framework.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.engine.observability.log_setup import FORMATS, LEVELS
from jaxpaged.entrypoints.http.foreign_options import FOREIGN_SERVER_OPTIONS
from jaxpaged.errors import ConfigError
from jaxpaged.option_checks import checked, option
from jaxpaged.parsing.parser import reasoning_format_named, tool_format_named
from jaxpaged.vllm_options import without_neutral


@dataclass(frozen=True)
class ServerOptions:
    """Where to listen, who may ask, and how much."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface", not_empty=True)
    port: int = option(8000, "port to listen on; 0: any free one", minimum=0, maximum=65535)
    admin_port: int | None = option(
        None, "port of the admin endpoints (sleep, reset_prefix_cache, ...), on 127.0.0.1 only; none by default",
        minimum=0, maximum=65535,
    )  # fmt: skip
    uds: str | None = option(
        None, "path of a Unix socket to listen on in place of host and port; who may use the file may ask",
        not_empty=True,
    )  # fmt: skip
    root_path: str = option("", "path below which a proxy shows the server, such as /llm")
    ssl_certfile: str | None = option(None, "file with the server's certificate (PEM): HTTPS", not_empty=True)
    ssl_keyfile: str | None = option(None, "file with its key, if it is not in the same one", not_empty=True)
    ssl_ca_certs: str | None = option(None, "file with the certificates of who signs those of clients", not_empty=True)
    ssl_cert_reqs: int = option(0, "certificates of clients: 0 none, 1 checked if sent, 2 needed", minimum=0, maximum=2)
    http: bool = option(True, "serve over HTTP; without it only over gRPC")
    grpc_port: int | None = option(
        None, "port of the gRPC server (extra grpc), on the same --host; none by default", minimum=0, maximum=65535
    )
    grpc_uds: str | None = option(None, "path of a Unix socket for the gRPC server", not_empty=True)
    grpc_admin_key_file: str | None = option(
        None, "file with the keys, one a line, that may call the gRPC service Admin; without it nobody may"
    )
    page: bool = option(True, "serve a page at / for people: a playground, and the engine at work")
    served_model_name: tuple[str, ...] | None = option(
        None, "names by which requests may call the model, the first being its own", not_empty=True
    )
    allowed_origins: tuple[str, ...] = option(
        (), "web pages that may ask from browsers, such as https://my.site; *: all"
    )
    api_key: tuple[str, ...] = option((), "keys that clients must show", not_empty=True)
    api_key_file: str | None = option(None, "file with a key a line: unlike --api-key, not in the list of processes")
    max_body_bytes: int = option(16 * 2**20, "longest request body", minimum=1)
    max_header_bytes: int = option(64 * 2**10, "longest request headers, with the request line", minimum=1024)
    max_connections: int = option(
        4096, "HTTP connections at a time, and so many of gRPC; of more, those go that wait longest without a request",
        minimum=1,
    )  # fmt: skip
    max_num_queued_reqs: int | None = option(
        None, "sequences that may wait for a place in the engine before requests get 429; unlimited by default",
        minimum=0,
    )  # fmt: skip
    max_num_queued_tokens: int | None = option(
        None, "prompt tokens that may wait before requests get 429; unlimited by default", minimum=0
    )
    max_sequences_per_request: int = option(2048, "sequences that one request may ask for: prompts times n", minimum=1)
    max_answer_bytes: int = option(
        256 * 2**20, "longest answer that one request may ask for, as far as max_tokens, n and log probabilities tell; "
        "streams are not held, so they are not limited", minimum=1,
    )  # fmt: skip
    shutdown_timeout: float = option(
        30.0, "seconds that requests under way get after SIGTERM; a second signal ends them at once", minimum=0
    )
    enable_prompt_tokens_details: bool = option(
        False, "report cached prompt tokens in usage; they tell clients what others asked before"
    )
    enable_force_include_usage: bool = option(False, "end every stream with its usage, and give it with every chunk")
    enable_request_id_headers: bool = option(False, "answer with X-Request-Id")
    tool_call_parser: str | None = option(
        None, "how the model writes tool calls, by vLLM's names: hermes, llama3_json, mistral, ...; default: what "
        "the chat template shows", not_empty=True,
    )  # fmt: skip
    enable_auto_tool_choice: bool = option(
        False, "let the model decide whether it calls tools: find the calls in what it writes; --tool-call-parser "
        "switches it on too",
    )  # fmt: skip
    reasoning_parser: str | None = option(
        None, "how the model marks its thinking, by vLLM's names: qwen3, deepseek_r1, ...; by default it is content",
        not_empty=True,
    )  # fmt: skip
    max_stored_responses: int = option(
        1000, "responses of /v1/responses that are kept in memory, the newest ones; 0: none", minimum=0
    )
    max_stored_response_bytes: int = option(256 * 2**20, "bytes of responses that are kept in memory", minimum=1)
    default_chat_template_kwargs: dict[str, Any] = option(
        {}, "variables of the chat template where a request brings none of that name, as JSON: "
        "'{\"enable_thinking\": false}'"
    )  # fmt: skip
    trust_request_chat_template: bool = option(False, "let requests bring a chat template of their own")
    sse_keep_alive_interval: float = option(
        0.0, "seconds of silence after which a stream gets a comment, to keep proxies from closing it; 0: never",
        minimum=0,
    )  # fmt: skip
    step_timeout: float = option(
        300.0, "seconds without a sign of life of the engine, such as a compiled program, after which its process is "
        "replaced", above=0,
    )  # fmt: skip
    max_restarts: int = option(
        5, "how often within an hour an engine that died or hung is replaced; then /health turns 503", minimum=0
    )
    ready_when: str = option(
        "compiled", "when /ready turns 200: 'compiled', all programs of ordinary requests are there; 'serving', "
        "requests are taken, and may wait for programs", choices=("compiled", "serving"),
    )  # fmt: skip
    access_log: bool = option(True, "log every request: its path, status, id and duration, nothing of its body")
    disable_access_log_for_endpoints: tuple[str, ...] = option(
        (), "paths whose requests are not logged, such as /v1/models,/metrics"
    )
    log_level: str = option("info", "least level of what is logged to standard error", choices=LEVELS)
    log_format: str = option("text", "lines of text, or an object of JSON a line", choices=FORMATS)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "ServerOptions":
        """Raises ConfigError for values out of range and for unknown parsers."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        own = without_neutral(options, FOREIGN_SERVER_OPTIONS)
        made = cls(**{name: checked(fields[name], value) for name, value in own.items()})
        if made.root_path and (not made.root_path.startswith("/") or made.root_path.endswith("/")):
            raise ConfigError(f"root_path is {made.root_path!r}; it must begin with a slash and not end with one.")
        if made.tool_call_parser is not None:
            tool_format_named(made.tool_call_parser)
        if made.reasoning_parser is not None:
            reasoning_format_named(made.reasoning_parser)
        return made
