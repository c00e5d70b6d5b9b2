"""What each metric of `/metrics` says of itself, by name: a sentence, with the unit where the name does not tell it."""

OF_REQUESTS = {
    "vllm:num_requests_running": "Sequences that the engine computes now.",
    "vllm:num_requests_waiting": "Sequences that wait for a place in the engine.",
    "vllm:prompt_tokens": "Tokens of prompts that were computed or found in the prefix cache.",
    "vllm:prompt_tokens_cached": "Those of them that were found in the prefix cache.",
    "vllm:generation_tokens": "Tokens that were generated.",
    "vllm:request_success": "Sequences that ended, by what ended them; an error is counted too.",
    "vllm:num_preemptions": "Sequences that lost their KV blocks to others, to be computed again later.",
    "vllm:time_to_first_token_seconds": "From the arrival of a prompt to the first token of a sequence.",
    "vllm:inter_token_latency_seconds": "From one token of a sequence to the next.",
    "vllm:request_time_per_output_token_seconds": "The mean of that over one sequence.",
    "vllm:e2e_request_latency_seconds": "From the arrival of a prompt to the end of a sequence.",
    "vllm:request_queue_time_seconds": "From when the engine core had a sequence until its first step.",
    "vllm:request_prefill_time_seconds": "From the first step of a sequence to its first token, or to its vector.",
    "vllm:request_decode_time_seconds": "From the first token of a sequence to its last.",
    "vllm:request_inference_time_seconds": "From the first step of a sequence to its last token.",
    "vllm:request_prompt_tokens": "Tokens of the prompt of a sequence.",
    "vllm:request_generation_tokens": "Tokens that a sequence was given.",
    "vllm:request_max_num_generation_tokens": "Tokens of the longest sequence of a prompt.",
    "vllm:request_params_max_tokens": "The max_tokens that a request asked for, or that were set for it.",
    "vllm:request_params_n": "Sequences that were asked for with one prompt.",
}

OF_THE_ENGINE = {
    "vllm:kv_cache_usage_perc": "Share of the KV blocks that sequences hold, from 0 to 1.",
    "vllm:prefix_cache_queries": "Tokens that were looked for in the prefix cache.",
    "vllm:prefix_cache_hits": "Tokens that were found in the prefix cache.",
    "vllm:engine_sleep_state": "1 for the state in which the engine is.",
    "vllm:iteration_tokens_total": "Tokens of prompts and answers that a step gave.",
    "vllm:cache_config_info": "Options of the KV cache, as labels; always 1.",
    "jaxpaged:engine_restarts": "Times that a core that died or hung was replaced.",
    "jaxpaged:trace_spans_lost": "Spans of traces that no collector got.",
    "jaxpaged:ready": "1 while /ready answers 200, else 0.",
    "jaxpaged:steps": "Steps since the engine core started.",
    "jaxpaged:scheduled_tokens": "Tokens computed since the engine core started, without padding.",
    "jaxpaged:padded_tokens": "Tokens of padding computed since the engine core started.",
    "jaxpaged:programs": "Compiled programs that are wanted so far.",
    "jaxpaged:programs_ready": "Those of them that are there.",
    "jaxpaged:ordinary_programs": "Compiled programs that ordinary requests need.",
    "jaxpaged:ordinary_programs_ready": "Those of them that are there.",
    "jaxpaged:programs_from_bundle": "Programs that were read from a bundle.",
    "jaxpaged:compile_seconds": "Seconds spent on compiling since the engine core started, of all threads together.",
    "jaxpaged:recompiles": "Programs that were compiled while a step waited, since the engine core started.",
    "jaxpaged:num_kv_blocks": "KV blocks of a device.",
    "jaxpaged:num_devices": "Devices that compute together.",
    "jaxpaged:weight_bytes": "Bytes of a device for weights, as planned.",
    "jaxpaged:state_bytes": "Bytes of a device for the state of running sequences, as planned.",
    "jaxpaged:kv_cache_bytes": "Bytes of a device for the KV cache, as planned.",
}

OF_THE_SERVERS = {
    "jaxpaged:http_requests_under_way": "Requests over HTTP and gRPC that the engine works for now.",
    "http_requests": "Requests over HTTP, by method, class of status and path; paths that probes ask are left out.",
    "http_request_duration_highr_seconds": "From the headers of a request to the last byte of its answer, all paths.",
    "http_request_duration_seconds": "The same by path, in coarse buckets.",
    "http_request_size_bytes": "Bytes of the bodies of requests.",
    "http_response_size_bytes": "Bytes of the bodies of answers.",
    "grpc_server_handled": "Calls over gRPC that ended, by method and status.",
    "grpc_server_handling_seconds": "From the beginning of a call over gRPC to its end.",
}

HELP: dict[str, str] = {**OF_REQUESTS, **OF_THE_ENGINE, **OF_THE_SERVERS}
