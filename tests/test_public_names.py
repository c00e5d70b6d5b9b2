"""What `from jaxpaged import ...` offers, and that what it offers can be used."""

import ast
import dataclasses
import inspect
from pathlib import Path

import msgspec
import pytest

import jaxpaged

VLLM_NAMES = """
    LLM SamplingParams BeamSearchParams PoolingParams RequestOutput CompletionOutput PoolingOutput PoolingRequestOutput
    EmbeddingOutput ClassificationOutput ScoringOutput EngineArgs AsyncEngineArgs LLMEngine AsyncLLMEngine TextPrompt
    TokensPrompt PromptType
""".split()


def test_the_names_that_scripts_for_vllm_import_are_there():
    assert set(VLLM_NAMES) <= set(jaxpaged.__all__)


@pytest.mark.parametrize("name", jaxpaged.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(jaxpaged, name) is not None
    assert name in dir(jaxpaged)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(jaxpaged.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    names = {alias.asname or alias.name for node in block.body for alias in node.names}
    assert names == set(jaxpaged.__all__)


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones():
    with pytest.raises(AttributeError, match="has no attribute 'LLLM'. Did you mean 'LLM'\\? It has LLM, "):
        jaxpaged.LLLM  # noqa: B018


@pytest.mark.parametrize(
    "name", [name for name in jaxpaged.__all__ if name.endswith("Output") and not name.startswith("Beam")] + ["Logprob"]
)
def test_vars_gives_the_fields_of_every_result(name):
    kind = getattr(jaxpaged, name)
    fields = dict.fromkeys(kind.__struct_fields__, 1)
    result = kind(**fields)
    assert vars(result) == fields
    assert msgspec.structs.replace(result) == result
    assert msgspec.structs.asdict(result) == fields


def test_prompts_are_dicts():
    assert jaxpaged.TextPrompt(prompt="a") == {"prompt": "a"}
    assert jaxpaged.TokensPrompt(prompt_token_ids=[1]) == {"prompt_token_ids": [1]}


# Arguments by place, as vLLM has them: a script that leaves the names out must mean the same here.
ORDERS = {
    "LLM.__init__": "model",
    "LLM.generate": "prompts sampling_params",
    "LLM.chat": "messages sampling_params use_tqdm lora_request chat_template chat_template_content_format "
    "add_generation_prompt continue_final_message tools chat_template_kwargs",
    "LLM.beam_search": "prompts params lora_request use_tqdm concurrency_limit",
    "LLM.encode": "prompts pooling_params",
    "LLM.embed": "prompts",
    "LLM.classify": "prompts",
    "LLM.score": "data_1 data_2",
    "LLM.enqueue": "prompts sampling_params lora_request priority use_tqdm tokenization_kwargs",
    "LLM.wait_for_completion": "output_type",
    "LLM.collective_rpc": "method timeout args kwargs",
    "LLM.apply_model": "func",
    "LLM.sleep": "level",
    "LLM.wake_up": "tags",
    "LLMEngine.add_request": "request_id prompt params arrival_time lora_request tokenization_kwargs trace_headers "
    "priority",
    "LLMEngine.from_engine_args": "engine_args",
    "AsyncLLM.from_engine_args": "engine_args",
    "AsyncLLM.generate": "prompt sampling_params request_id",
    "AsyncLLM.encode": "prompt pooling_params request_id",
}


@pytest.mark.parametrize("method", ORDERS)
def test_arguments_by_place_are_in_vllms_order(method):
    kind, name = method.split(".")
    function = inspect.unwrap(inspect.getattr_static(getattr(jaxpaged, kind), name))
    parameters = inspect.signature(getattr(function, "__func__", function)).parameters.values()
    placed = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    assert placed[: len(ORDERS[method].split())] == ORDERS[method].split()


NAMED = {
    "LLM.generate": "use_tqdm lora_request priority tokenization_kwargs mm_processor_kwargs",
    "LLM.chat": "tokenization_kwargs mm_processor_kwargs",
    "LLM.encode": "truncate_prompt_tokens use_tqdm lora_request pooling_task tokenization_kwargs",
    "LLM.embed": "truncate_prompt_tokens use_tqdm pooling_params lora_request tokenization_kwargs",
    "LLM.classify": "truncate_prompt_tokens use_tqdm pooling_params lora_request tokenization_kwargs",
    "LLM.score": "truncate_prompt_tokens use_tqdm pooling_params lora_request tokenization_kwargs",
    "AsyncLLM.generate": "lora_request tokenization_kwargs trace_headers priority data_parallel_rank",
    "AsyncLLM.encode": "lora_request tokenization_kwargs trace_headers priority",
}


@pytest.mark.parametrize("method", NAMED)
def test_arguments_by_name_are_known(method):
    kind, name = method.split(".")
    parameters = inspect.signature(getattr(getattr(jaxpaged, kind), name)).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    assert takes_any or set(NAMED[method].split()) <= set(parameters)


def test_engine_args_are_a_dataclass():
    assert dataclasses.is_dataclass(jaxpaged.EngineArgs)
