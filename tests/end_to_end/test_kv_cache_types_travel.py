"""Keys and values of 8 bits besides the device: on disks, in files of beginnings, and from engine to engine, they are
what was cached, with their scales; engines with another type, or with other scales, never take them."""

import numpy as np
import pytest

from jaxpaged import LLM
from jaxpaged.errors import ConfigError, PageError
from jaxpaged.kv_store.page import PageKey, decode, scales_of
from jaxpaged.params.kv_scales import scales_file
from tests.end_to_end.test_kv_cache_types import OPTIONS, answers
from tests.models.checkpoints import prompt_of, write_checkpoint

OPTIONS = {**OPTIONS, "max_model_len": 96, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 32}
OPTIONS["token_buckets"] = (32,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_checkpoint("qwen3", tmp_path_factory.mktemp("model")))


def given():
    return [{"prompt_token_ids": [*prompt_of("qwen3"), *prompt_of("qwen3")][:70]}]


def pages_loaded(llm):
    return llm.llm_engine._core.executor.worker.stats()["kv_offload_pages_loaded"]


def scales_of_layers(path, factor):
    path.write_text(scales_file("qwen3", "int8", {i: (np.float32(factor), np.float32(factor)) for i in range(2)}))
    return {"kv_cache_dtype": "int8", "kv_cache_scales": str(path)}


@pytest.mark.parametrize("name", ["int8_per_token_head", "int8"])
def test_what_leaves_the_device_is_what_was_cached(folder, name, tmp_path):
    """Into a folder of pages, and back in the next engine, which has two devices; and nowhere else."""
    own = scales_of_layers(tmp_path / "own", 0.03) if name == "int8" else {"kv_cache_dtype": name}
    options = {**OPTIONS, **own, "kv_offload": f"host=16M,disk={tmp_path}/pages:64M,page_tokens=16"}
    with LLM(folder, **options) as llm:
        tokens, values, _ = answers(llm, given())
        worker = llm.llm_engine._core.executor.worker
        space = worker.kv_transfer.layout.namespace
        assert llm.reset_prefix_cache()
        again = answers(llm, given())
        assert (again[0], again[2] > 40) == (tokens, True) and pages_loaded(llm)
        np.testing.assert_allclose(again[1], values, atol=1e-5)
        llm.save_prefix(given()[0], tmp_path / "beginning")
    files = list((tmp_path / "pages").rglob("*.safetensors"))
    for path in files:
        block_hash, group = path.stem.split("_g")
        page = path.read_bytes()
        header, kv = decode(page, expect_namespace=space, key=PageKey(bytes.fromhex(block_hash), int(group)))
        scales = scales_of(page, header)
        assert kv.dtype == np.int8 and (scales is None) == (name == "int8")
        if scales is not None:
            assert (np.abs(kv).max(axis=-1) == 127).all() and (scales > 0).all(), "each token and head uses all numbers"
    assert files
    with LLM(folder, **options, tensor_parallel_size=2) as llm:
        found, near, cached = answers(llm, given())
        assert (found, cached > 40) == (tokens, True)
        np.testing.assert_allclose(near, values, atol=1e-2)
        assert llm.load_prefix(tmp_path / "beginning").num_tokens > 40
    others = [{}, {"kv_cache_dtype": "fp8_per_token_head"}]
    if name == "int8":
        others = [scales_of_layers(tmp_path / "other", 0.031)]
    for other in others:
        changed = {key: value for key, value in options.items() if key not in own} | other
        with LLM(folder, **changed) as llm:
            answers(llm, given())
            assert pages_loaded(llm) == 0, "pages of another type were taken"
            with pytest.raises(PageError, match="namespace"):
                llm.load_prefix(tmp_path / "beginning")


def test_rounding_twice_and_stores_without_scales_are_refused(folder):
    for offload, message in {
        "host=16M,pages=int8": "pages=int8, but kv_cache_dtype is fp8_e4m3: pages of such a cache have 8 bits already",
        "lmcache=lm://127.0.0.1:1": "kv_cache_dtype is fp8_e4m3, and LMCache's chunks hold keys and values of 16 or 32",
    }.items():
        with pytest.raises(ConfigError, match=message):
            LLM(folder, kv_cache_dtype="fp8", kv_offload=offload, **OPTIONS)
