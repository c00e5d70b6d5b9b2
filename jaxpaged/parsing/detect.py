"""Which format a model writes its calls in, read off its chat template, which writes earlier calls the same way.

This module knows texts that only one format has, and reads no answers.
"""

SIGNS = (
    ("｜DSML｜", "deepseek_v32"),
    ("<｜tool▁sep｜>", "deepseek_v31"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<start_function_call>", "functiongemma"),
    ("<longcat_tool_call>", "longcat"),
    ("<|tool_call>", "gemma4"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "jamba"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<|channel|>commentary", "openai"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
)
"""A text in a template -> the format; the first that is there decides."""


def tool_parser_of(template: str) -> str | None:
    """The name of a tool parser, or None when the template does not show it."""
    name = next((name for sign, name in SIGNS if sign in template), None)
    if name == "deepseek_v31" and "```json" in template:
        return "deepseek_v3"
    return name
