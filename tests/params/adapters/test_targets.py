"""Which matrices of a model an adapter can change."""

import pytest

from jaxpaged.models.registry import model_for
from jaxpaged.params.adapters.targets import targets_of
from tests.models.checkpoints import CONFIGS

ATTENTION = {f".layers[1].self_attn.{name}_proj" for name in "qkvo"}
FEED_FORWARD = {f".layers[1].mlp.{name}_proj" for name in ("gate", "up", "down")}
TABLES = {".embed_tokens", ".lm_head"}


def targets_in(name, **changed):
    hf = {**CONFIGS[name], **changed}
    model = model_for(hf)
    return targets_of(model.param_specs(model.config_from_hf(hf), 1))


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "mixtral", "qwen3_moe", "gpt_oss", "gemma3"])
def test_all_matrices_of_a_decoder_are_targets_and_norms_are_not(name):
    targets = targets_in(name)
    here = {path for path in targets if path.startswith(".layers[1]")}
    router = {".layers[1].mlp.router"} if name in ("mixtral", "qwen3_moe", "gpt_oss") else set()
    assert here == ATTENTION | FEED_FORWARD | router
    assert {path for path in targets if not path.startswith(".layers")} == TABLES


def test_a_target_knows_its_letters_its_kind_and_what_the_checkpoint_calls_it():
    targets = targets_in("mixtral")
    o_proj, down = targets[".layers[1].self_attn.o_proj"], targets[".layers[0].mlp.down_proj"]
    assert (o_proj.outputs, o_proj.inputs, o_proj.kind) == ("D", "NH", "linear")
    assert (down.outputs, down.inputs, down.is_experts) == ("D", "Q", True)
    assert down.module == "model.layers.0.block_sparse_moe.experts.{}.w2"
    assert targets[".embed_tokens"].kind == "embedding" and targets[".lm_head"].kind == "head"


def test_a_head_that_is_the_table_of_embeddings_is_a_target_of_its_own():
    head = targets_in("gemma3")[".lm_head"]
    assert head.is_tied and head.module == "lm_head" and head.spec.hf_name == "model.embed_tokens.weight"
    assert not targets_in("llama")[".lm_head"].is_tied


def test_what_queries_and_values_take_in_is_said():
    kinds = {target.attribute: target.kind for target in targets_in("deepseek_v3").values()}
    assert kinds["k_up"] == kinds["v_up"] == "absorbed" and kinds["kv_a_proj"] == "linear"
