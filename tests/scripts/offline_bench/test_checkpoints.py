"""Random-weight checkpoints: complete, readable by jaxpaged, and written once."""

import numpy as np
import pytest
from offline_bench import checkpoints
from offline_bench.workloads import WORKLOADS, make_requests
from safetensors.numpy import load_file

from jaxpaged import LLM, SamplingParams
from jaxpaged.engine.input.tokenizer import load_tokenizer

TINY = checkpoints.MODELS["tiny"]
VOCABULARY = TINY.vocab_size


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory):
    return checkpoints.make_checkpoint(TINY, tmp_path_factory.mktemp("checkpoints"))


def test_a_checkpoint_has_every_tensor_in_bfloat16(tiny_checkpoint):
    found = load_file(tiny_checkpoint / "model.safetensors")
    assert {name: array.shape for name, array in found.items()} == dict(checkpoints.tensors(TINY))
    assert {str(array.dtype) for array in found.values()} == {"bfloat16"}
    weights = found["model.layers.0.mlp.gate_proj.weight"].astype(np.float32)
    assert abs(weights.mean()) < 0.002
    assert weights.std() == pytest.approx(checkpoints.SPREAD, rel=0.1)
    assert (found["model.norm.weight"] == 1).all()
    assert sum(array.size for array in found.values()) == TINY.num_parameters


def test_the_tokenizer_has_a_text_for_every_id(tiny_checkpoint):
    tokenizer = load_tokenizer(tiny_checkpoint)
    assert tokenizer.vocab_size == VOCABULARY
    assert tokenizer.decode(tokenizer.encode("Ünï!", add_special_tokens=False)) == "Ünï!"
    assert tokenizer.decode([300, 301]) == " word300 word301"


def test_jaxpaged_completes_prompts_with_a_checkpoint(tiny_checkpoint):
    (request,) = make_requests(WORKLOADS["single"], VOCABULARY, 0, 0.05)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with LLM(model=str(tiny_checkpoint), max_model_len=64, max_num_seqs=8, max_num_batched_tokens=16) as llm:
        (output,) = llm.generate({"prompt_token_ids": request.prompt_token_ids}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


def test_a_checkpoint_is_written_once_and_again_when_it_is_another_or_unfinished(tiny_checkpoint):
    weights = tiny_checkpoint / "model.safetensors"
    before = weights.stat().st_mtime_ns
    checkpoints.make_checkpoint(TINY, tiny_checkpoint.parent)
    assert weights.stat().st_mtime_ns == before
    (tiny_checkpoint / checkpoints.MARKER).unlink()
    checkpoints.make_checkpoint(TINY, tiny_checkpoint.parent)
    assert weights.stat().st_mtime_ns != before


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(OSError, match="Make room"):
        checkpoints.make_checkpoint(TINY, tmp_path)
    assert not (tmp_path / "tiny" / "model.safetensors").exists()


def test_shapes_count_what_they_are_made_of():
    llama, qwen = checkpoints.MODELS["llama-110m"], checkpoints.MODELS["qwen3-0.6b"]
    assert llama.num_parameters == pytest.approx(110e6, rel=0.01)
    assert qwen.num_parameters == pytest.approx(0.596e9, rel=0.01)
    assert checkpoints.MODELS["llama-8b"].num_parameters == pytest.approx(8.03e9, rel=0.001)
    norms = sum(shape[0] for _, shape in checkpoints.tensors(qwen) if len(shape) == 1)
    assert qwen.weight_bytes_per_step == 2 * (qwen.num_parameters - norms)
