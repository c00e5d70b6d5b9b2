"""Engines that share keys and values through a Redis server or a bucket: the real stores, where they are installed."""

import json

import pytest

from jaxpaged import LLM
from jaxpaged.errors import ConfigError
from tests.end_to_end.test_kv_offload import OPTIONS, PROMPTS, answers, worker_of
from tests.kv_store.test_real_stores import CREDENTIALS, free_port, s3_endpoint, start_redis

pytestmark = pytest.mark.slow
__all__ = ["s3_endpoint"]


def check_that_the_next_engine_loads(options):
    """One engine computes and saves, and another one, which begins with nothing, loads."""
    llm = LLM(**OPTIONS, **options)
    expected, cached = answers(llm)
    assert max(cached) < 200, "it found what is another's"
    llm.shutdown()
    llm = LLM(**OPTIONS, **options)
    again, cached = answers(llm)
    stats = worker_of(llm).stats()
    llm.shutdown()
    assert again == expected and min(cached) > 60 and stats["recompiles"] == 0, stats


def test_redis_with_a_password_and_signed_pages(tmp_path):
    process = start_redis(port := free_port(), tmp_path, "--requirepass", "hush hush")
    secrets = tmp_path / "secrets.json"
    said = {"redis_password": "hush hush", "page_secret": "sixteen letters."}
    secrets.write_text(json.dumps(said), encoding="utf-8")
    options = {"kv_offload": f"host=64M,redis=redis://127.0.0.1:{port}?ttl=600", "kv_offload_secrets": str(secrets)}
    try:
        check_that_the_next_engine_loads(options)
        check_that_the_next_engine_loads({**options, "kv_cache_dtype": "fp8_per_token_head"})
        secrets.write_text(json.dumps({**said, "page_secret": "another of sixteen"}), encoding="utf-8")
        llm = LLM(**OPTIONS, **options)
        assert answers(llm, PROMPTS[:1])[1] == [0], "pages that another secret signed were used"
    finally:
        process.kill()
        process.wait()
    assert len(answers(llm, PROMPTS[2:])[0]) == 1, "a server that is gone costs nothing but its pages"
    llm.shutdown()


def test_a_bucket(s3_endpoint, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv({"region": "AWS_REGION"}.get(name, f"AWS_{name.upper()}"), value)
    options = {"kv_offload": f"s3=s3://pages/kv?endpoint={s3_endpoint}"}
    for more in ({}, {"kv_cache_dtype": "int8_per_token_head"}):
        check_that_the_next_engine_loads(options | more)


def test_a_store_of_ones_own_behind_host_memory(tmp_path):
    connector = {
        "kv_connector": "SQLite",
        "kv_connector_module_path": "tests.kv_store.example_connector",
        "kv_connector_extra_config": {"file": str(tmp_path / "pages.sqlite")},
    }
    check_that_the_next_engine_loads({"kv_offload": "host=64M", "kv_transfer_config": connector})


def test_a_store_whose_package_is_missing(monkeypatch):
    monkeypatch.setattr("jaxpaged.worker.kv_transfer.opening.is_installed", lambda name: False)
    with pytest.raises(ConfigError, match=r"package obstore\. To install it, run pip install -e '\.\[s3\]'"):
        LLM(**OPTIONS, kv_offload="s3=s3://bucket/kv")
