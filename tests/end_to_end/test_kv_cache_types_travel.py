"""Keys and values of 8 bits besides the device: on disks, in files of beginnings, and from engine to engine, they are
what was cached, with their scales; engines with another type, or with other scales, never take them."""

from contextlib import closing

import msgspec
import numpy as np
import pytest

from jaxpaged import LLM
from jaxpaged.errors import ConfigError, PageError
from jaxpaged.kv_store.page import PageKey, decode, scales_of
from jaxpaged.params.kv_scales import scales_file
from tests.end_to_end.test_handover_pairs import use
from tests.end_to_end.test_kv_cache_types import OPTIONS, PARAMS, answers
from tests.end_to_end.test_kv_offload import worker_of
from tests.end_to_end.test_kv_pairs import patient
from tests.kv_store.lmcache.fake_server import FakeServer
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


@pytest.mark.parametrize("name", ["int8_per_token_head", pytest.param("int8", marks=pytest.mark.exhaustive)])
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


@pytest.mark.parametrize("name", ["int8_per_token_head", pytest.param("int8", marks=pytest.mark.exhaustive), "fp8"])
def test_the_next_engine_goes_on_from_lmcaches_chunks(name, folder, tmp_path):
    """With the same answers as the one that computed all; an engine that caches otherwise finds nothing there."""
    own = scales_of_layers(tmp_path / "own", 0.03) if name == "int8" else {"kv_cache_dtype": name}
    with closing(FakeServer()) as server:
        offload = f"page_tokens=16,lmcache={server.url}?chunk_size=16&model=org/model"
        options = {**OPTIONS, "kv_offload": offload}
        with LLM(folder, **options, **own) as llm:
            tokens, values, _ = answers(llm, given())
        for other in (own, {}) if name == "fp8" else (own, {"kv_cache_dtype": "fp8"}):
            with LLM(folder, **options, **other) as llm:
                patient(llm)
                found, near, cached = answers(llm, given())
                assert (cached > 40) == (other is own), cached
                if other is own:
                    assert found == tokens
                    np.testing.assert_allclose(near, values, atol=1e-5)
        check_chunks(server, name)


def check_chunks(server, name):
    """What is like vLLM's is called so; what is not has names of its own, and bytes for all that it means."""
    extents = {"int8_per_token_head": 2 * (16 + 4)}.get(name, 2 * 16)
    of_8_bits = {key: said for key, (said, _) in server.chunks.items() if key.endswith("@uint8")}
    assert {said[1:] for said in of_8_bits.values() if said[6] == extents} == {(1, 6, 2, 2, 16, extents)}
    models = {key.partition("@")[0] for key in server.chunks}
    assert "org/model" in models and len(models) == (1 if name == "fp8" else 2)
    assert all(model.startswith("org/model#") for model in models - {"org/model"})


@pytest.mark.parametrize("name", ["int8_per_token_head", pytest.param("int8", marks=pytest.mark.exhaustive)])
def test_a_prompt_is_handed_over(folder, name, tmp_path):
    """Through shared memory and through a socket, to an engine with other blocks and two devices."""
    own = scales_of_layers(tmp_path / "own", 0.03) if name == "int8" else {"kv_cache_dtype": name}
    options = {**OPTIONS, **own, "kv_offload": "host=16M,page_tokens=16"}
    more = {"block_size": 16, "tensor_parallel_size": 2, "kv_role": "kv_consumer"}
    with LLM(folder, **options, kv_role="kv_producer") as producer, LLM(folder, **{**options, **more}) as consumer:
        patient(consumer)
        for shares in (True, False):
            prompt = {"prompt_token_ids": given()[0]["prompt_token_ids"][int(shares) :]}
            tokens, values, _ = answers(producer, [prompt])
            use(consumer, "shared_memory" if shares else "tcp")
            (lent,) = producer.generate([prompt], handing_over(1, do_remote_decode=True), use_tqdm=False)
            said = handing_over(10, **lent.kv_transfer_params)
            found, near, cached = answers(consumer, [prompt], said)
            assert (found, cached >= 48) == (tokens, True)
            np.testing.assert_allclose(near, values, atol=1e-2)
        carried = worker_of(consumer).stats()["kv_borrowed_pages"]
        assert carried["tcp"] and carried["shared_memory"]


def handing_over(max_tokens, **transfer):
    return msgspec.structs.replace(PARAMS, max_tokens=max_tokens, extra_args={"kv_transfer_params": transfer})


def test_rounding_twice_and_layers_of_several_types_in_one_chunk_are_refused(folder):
    for more, message in {
        (
            "host=16M,pages=int8",
        ): "pages=int8, but kv_cache_dtype is fp8_e4m3: pages of such a cache have 8 bits already",
        ("lmcache=lm://127.0.0.1:1", "0"): "some layers of this model are cached in 8 bits, others not",
    }.items():
        offload, *skipped = more
        options = {**OPTIONS, "kv_offload": offload, "kv_cache_dtype_skip_layers": skipped}
        with pytest.raises(ConfigError, match=message):
            LLM(folder, kv_cache_dtype="fp8", **options)
