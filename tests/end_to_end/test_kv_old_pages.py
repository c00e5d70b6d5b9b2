"""Pages that an engine of 27 November 2026 wrote (commit f0e4053) are read, and new ones have the same names."""

import shutil

from jaxpaged import LLM, SamplingParams
from tests.models.checkpoints import write_checkpoint
from tests.models.paged import GOLDEN

OLD = GOLDEN / "kv_folder"
"""What LLM(load_format="dummy", **OPTIONS) left of PROMPT, 32 tokens of which fill a page."""
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "block_size": 16,
    "max_num_seqs": 2,
    "token_buckets": (8, 64),
    "num_gpu_blocks_override": 20,
    "num_scheduler_steps": 1,
}
PROMPT = {"prompt_token_ids": [(7 * i) % 90 + 1 for i in range(40)]}
TOKENS = [138, 83, 113, 113]
"""That the old engine answered."""


def test_an_old_folder_is_read(tmp_path):
    model = str(write_checkpoint("llama", tmp_path / "llama"))
    shutil.copytree(OLD, tmp_path / "old")
    for folder, num_cached in (("old", 32), ("new", 0)):
        options = {**OPTIONS, "kv_offload": f"disk={tmp_path / folder}:1M"}
        with LLM(model=model, load_format="dummy", **options) as llm:
            greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            (answer,) = llm.generate([PROMPT], greedy, use_tqdm=False)
        assert answer.num_cached_tokens == num_cached, "its namespace, keys, or page format are not the old ones"
        assert list(answer.outputs[0].token_ids) == TOKENS
    folders = [tmp_path / "old", tmp_path / "new"]
    names = [{path.relative_to(folder) for path in folder.rglob("*.safetensors")} for folder in folders]
    assert names[0] == names[1] and len(names[0]) == 1
