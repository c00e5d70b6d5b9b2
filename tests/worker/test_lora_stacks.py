"""Which parameters of an engine, or of one of its stages, have stacks."""

import jax.numpy as jnp
import pytest

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.params.adapters.targets import targets_of
from jaxpaged.worker.lora_stacks import lora_spec, of_stage
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


@pytest.mark.parametrize("modules", [None, ("all-linear", "embed_tokens", "lm_head"), ("lm_head",)])
def test_tables_have_stacks_where_they_are_named_and_no_probe_sees_them(modules, tmp_path):
    specs, config = specs_of(write_checkpoint("llama", tmp_path))
    sizes, options = config.dim_sizes(), {"max_loras": 2, "max_rank": 8, "dtype": jnp.float32}
    spec = lora_spec(targets_of(specs), specs, sizes, make_mesh(1), **options, modules=modules)
    tables = {".embed_tokens", ".lm_head"} & spec.paths
    assert tables == {f".{name}" for name in modules or () if name != "all-linear"}
    assert spec.head == (".lm_head" if modules else None)
    assert not spec.changes_layers(dict.fromkeys(tables)) and bool(spec.layers) == (modules != ("lm_head",))
    assert all(spec.changes_layers({path: None}) for path in spec.layers)
