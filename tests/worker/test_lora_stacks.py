"""Which parameters of an engine, or of one of its stages, have stacks."""

import pytest

from jaxpaged.params.adapters.targets import targets_of
from jaxpaged.worker.lora_stacks import of_stage
from tests.models.adapted import specs_of
from tests.models.checkpoints import write_checkpoint


@pytest.mark.parametrize(("checkpoint", "is_tied"), [("llama", False), ("qwen2", True)])
def test_the_table_of_a_stage_without_the_head_is_the_head_of_tied_models_only(checkpoint, is_tied, tmp_path):
    specs, _ = specs_of(write_checkpoint(checkpoint, tmp_path))
    whole = targets_of(specs)
    own = targets_of(specs if is_tied else specs.replace(lm_head=None))
    assert whole[".lm_head"].is_tied == is_tied and own[".lm_head"].is_tied
    found = of_stage(whole, own)
    assert (".lm_head" in found) == is_tied and ".embed_tokens" in found
