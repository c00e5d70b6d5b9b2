"""vLLM's options of the server that this one does not have, and the values at which they ask for nothing.

The counterpart of `jaxpaged.vllm_options`, which has those of the engine and the rule.
"""

from jaxpaged.vllm_options import ForeignOption, absent, pointless

ONE_SERVER = "one process serves; start several behind a proxy"
NO_CODE = "the server runs no code that an option names"

FOREIGN_SERVER_OPTIONS: dict[str, ForeignOption] = {each.name: each for each in (
    absent("api_server_count", 1, why=ONE_SERVER),
    absent("headless", False, why=ONE_SERVER),
    absent("data_parallel_address", None, why=ONE_SERVER),
    absent("data_parallel_rpc_port", None, why=ONE_SERVER),
    absent("data_parallel_start_rank", None, 0, why=ONE_SERVER),
    absent("middleware", [], why=NO_CODE),
    absent("tool_parser_plugin", "", why=NO_CODE),
    absent("reasoning_parser_plugin", "", why=NO_CODE),
    absent("chat_template_content_format", "auto", "string", why="a template gets contents as text"),
    absent("default_chat_template_kwargs", {}, why="requests bring chat_template_kwargs themselves"),
    absent("response_role", "assistant", why="answers have the role assistant"),
    absent("return_tokens_as_token_ids", False, why="tokens are reported as text"),
    absent("allow_credentials", False, why="browsers send no cookies that the server would read"),
    absent("allowed_methods", ["*"], why="every page of allowed_origins may use every endpoint"),
    absent("allowed_headers", ["*"], why="every page of allowed_origins may use every endpoint"),
    absent("enable_tokenizer_info_endpoint", False, why="there is no such endpoint"),
    absent("enable_server_load_tracking", False, True, why="it must be true or false"),  # /load always tells it
    absent("tool_server", None, why="the server calls no tools"),
    absent("grpc", False, why="gRPC has a port of its own"),
    absent("enable_ssl_refresh", False, why="certificates are read at the start"),
    absent("exclude_tools_when_tool_choice_none", False, why="the template sees the tools that a request brings"),
    pointless("disable_frontend_multiprocessing", False, bool),
    pointless("disable_fastapi_docs", False, bool, "only /openapi.json describes the endpoints"),
    pointless("h11_max_header_count", 256, int, "max_header_bytes limits headers"),
    pointless("h11_max_incomplete_event_size", 4 * 2**20, int, "max_header_bytes limits headers"),
)}  # fmt: skip
