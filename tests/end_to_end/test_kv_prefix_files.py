"""A conversation's beginning travels as a file: from Python and the command line, into other engines and no others."""

import pytest

from jaxpaged import LLM
from jaxpaged.entrypoints.cli import main
from jaxpaged.errors import PageError, UsageError
from tests.end_to_end.test_kv_offload import GREEDY, OPTIONS, STORY, answers, worker_of

pytestmark = pytest.mark.slow
PROMPT = STORY + "Who was it?"
FLAGS = [
    "--max-model-len",
    "512",
    "--token-buckets",
    "[8, 128]",
    "--num-scheduler-steps",
    "1",
    "--max-num-seqs",
    "4",
    "--block-size",
    "16",
    "--num-gpu-blocks-override",
    "200",
]


def test_a_beginning_is_saved_and_loaded_by_another_engine(tmp_path, capsys):
    path = tmp_path / "story.safetensors"
    with LLM(**OPTIONS, kv_offload="host=64M") as llm:
        expected, _ = answers(llm, [PROMPT])
        info = llm.save_prefix(PROMPT, path)
        assert 0 < info.num_tokens <= len(llm.get_tokenizer().encode(PROMPT)) and info.num_pages
        llm.load_prefix(path)  # what is there already
        with pytest.raises(UsageError, match="tokens, and a file holds full blocks and pages, of 32 "):
            llm.save_prefix("Hi", tmp_path / "short")
        assert worker_of(llm).stats()["recompiles"] == 0
    disk = tmp_path / "tier"
    assert main(["kv", "import", str(path), str(disk)]) == 0
    assert f"{info.num_tokens} tokens of demo" in capsys.readouterr().out
    with LLM(**OPTIONS, kv_offload=f"disk={disk}:1G") as llm:
        (result,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert [result.outputs[0].token_ids] == expected and result.num_cached_tokens == info.num_tokens
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(PageError, match="its header says"):
            llm.load_prefix(path)
    assert main(["kv", "import", str(path), str(disk)]) == 1
    assert "its header says" in capsys.readouterr().err


def test_the_command_line_exports_and_another_models_file_is_refused(tmp_path, capsys):
    path = tmp_path / "x.safetensors"
    assert main(["kv", "export", PROMPT, "--raw", "-o", str(path), *FLAGS]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{path}: ") and "tokens of demo" in said
    with LLM(**OPTIONS, kv_offload="host=64M") as llm:
        info = llm.load_prefix(path)
        (result,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert result.num_cached_tokens == info.num_tokens
    refused = pytest.raises(PageError, match="holds keys and values of 'demo'.* this engine has 'demo'")
    with LLM(**OPTIONS, kv_offload="host=64M", kv_cache_dtype="float16") as llm, refused:
        llm.load_prefix(path)
    assert main(["kv", "export", "a", "b", "-o", str(path)]) == 2
    assert "a file holds one" in capsys.readouterr().err
