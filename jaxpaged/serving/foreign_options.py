"""vLLM's options of the server that this one does not have, and the values at which they ask for nothing.

The counterpart of `jaxpaged.config.vllm_options`, which has those of the engine and the rule.
"""

from jaxpaged.config.vllm_options import NUMBER, SEE_PLUGINS, ForeignOption, absent, pointless, renamed

ONE_PROCESS = "one process serves"
BEHIND_PROXY = "Start several servers behind a proxy (`jaxpaged proxy`, nginx), or give data_parallel_size."
NOT_LOGGED = "nothing of prompts and answers is logged"
ALL_MAY = "every page of allowed_origins may use every endpoint"
NO_ENDPOINT = "there is no such endpoint"
FINGERPRINT = "answers name the version of jaxpaged as their system_fingerprint"
LOG_LEVELS = {"trace": "debug", "critical": "error"}
"""uvicorn's levels that are not ours -> the nearest."""

FOREIGN_SERVER_OPTIONS: dict[str, ForeignOption] = {
    each.name: each
    for each in (
        # ---- processes
        absent("api_server_count", 1, why=ONE_PROCESS, do=BEHIND_PROXY),
        absent("headless", False, why=ONE_PROCESS, do="Give nnodes and node_rank for hosts that compute together."),
        pointless("data_parallel_supervisor_port", 9256, int),
        pointless("dp_supervisor_probe_interval_s", 5.0, NUMBER),
        pointless("dp_supervisor_probe_timeout_s", 5.0, NUMBER),
        pointless("dp_supervisor_probe_failure_threshold", 3, int),
        pointless("disable_frontend_multiprocessing", False, bool),
        absent("grpc", False, why="gRPC has a port of its own, beside HTTP", do="Give grpc_port, and no_http with it."),
        # ---- code
        absent("middleware", [], why="the server runs no code that an option names", do="Put a proxy before it."),
        absent("tool_parser_plugin", "", why=SEE_PLUGINS, do="Give the file as plugin."),
        absent("tool_server", None, why="the server calls no tools", do="Let the client call them."),
        # ---- chats
        absent("chat_template_content_format", "auto", "string", why="a template gets contents as text"),
        absent("response_role", "assistant", why="answers have the role assistant"),
        absent(
            "return_tokens_as_token_ids",
            False,
            why="tokens are reported as text",
            do="Leave it out; a request may set return_tokens_as_token_ids.",
        ),
        absent("exclude_tools_when_tool_choice_none", False, why="the template sees the tools that a request brings"),
        absent(
            "tool_strict_level",
            "auto",
            why="a request says whether calls are held to their schema",
            do="Let it set strict of a function.",
        ),
        pointless("enable_reasoning", False, bool),  # reasoning_parser alone switches it on
        pointless("cohere_is_reasoning_model", True, bool),
        absent("cohere_format", "cmd4", why="chats of Command models are written by their own template"),
        pointless("enable_flash_late_interaction", True, bool),
        # ---- what is told
        renamed("uvicorn_log_level", str, lambda level: {"log_level": LOG_LEVELS.get(level, level)}, "info"),
        renamed("disable_uvicorn_access_log", bool, lambda off: {"access_log": not off}, False),
        absent(
            "log_config_file", None, why="two options say what is logged, and how", do="Give log_level and log_format."
        ),
        pointless("max_log_len", None, int),
        absent("enable_log_outputs", False, why=NOT_LOGGED),
        pointless("enable_log_deltas", True, bool),
        absent("log_error_stack", False, why="an error of a request is answered, not logged", do="Give --debug."),
        absent(
            "enable_per_request_metrics",
            False,
            why="answers bring no times",
            do="Leave it out; /metrics has them, and otlp_traces_endpoint sends those of each request.",
        ),
        absent("fingerprint_mode", "full", "hash", why=FINGERPRINT),
        absent("fingerprint_value", None, why=FINGERPRINT),
        absent("enable_server_load_tracking", False, True, why="it must be true or false"),  # /load always tells it
        # ---- endpoints
        absent("enable_tokenizer_info_endpoint", False, why=NO_ENDPOINT),
        absent("enable_scale_out", False, why=NO_ENDPOINT),
        absent("enable_offline_docs", False, why="only /openapi.json describes the endpoints"),
        pointless("disable_fastapi_docs", False, bool, "only /openapi.json describes the endpoints"),
        # ---- browsers, TLS, headers
        absent("allow_credentials", False, why="browsers send no cookies that the server would read"),
        absent("allowed_methods", ["*"], why=ALL_MAY, many=True),
        absent("allowed_headers", ["*"], why=ALL_MAY, many=True),
        absent("enable_ssl_refresh", False, why="certificates are read at the start", do="Restart it for new ones."),
        absent("ssl_ciphers", None, why="the ciphers are those of OpenSSL's default", do="Let a proxy end TLS."),
        pointless("h11_max_header_count", 256, int, "max_header_bytes limits headers"),
        pointless("h11_max_incomplete_event_size", 4 * 2**20, int, "max_header_bytes limits headers"),
    )
}
