"""Adapters that PEFT wrote, merged by `jaxpaged merge`, against the logits of PEFT's own models."""

import json

import numpy as np
import pytest

from jaxpaged.entrypoints.cli import main
from jaxpaged.models.pooling import pooling_model
from jaxpaged.models.registry import model_for
from tests.models.adapted import GOLDEN, write_base
from tests.models.checkpoints import CONFIGS, prompt_of
from tests.models.paged import PagedModel, max_model_len_of

GENERATING = sorted({path.name for path in GOLDEN.iterdir()} - {"classifier", "head_of_roberta", "head_of_modernbert"})


def merged(name, tmp_path):
    """(what is recorded, the folder of the merged model)."""
    golden = json.loads((GOLDEN / name / "logits.json").read_text())
    base = write_base(golden["checkpoint"], tmp_path / "base")
    assert main(["merge", str(base), str(GOLDEN / name), "-o", str(tmp_path / "out")]) == 0
    return golden, tmp_path / "out"


@pytest.mark.parametrize("name", GENERATING)
def test_logits_are_those_of_peft(name, tmp_path):
    golden, folder = merged(name, tmp_path)
    model = PagedModel(folder, max_model_len=max_model_len_of(golden["checkpoint"]))
    logits = model.logits(prompt_of(golden["checkpoint"]))
    for position, top in golden["top"].items():
        np.testing.assert_allclose(logits[int(position)][top["ids"]], top["logits"], rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(logits.sum(axis=1), golden["sums"], rtol=1e-4, atol=4e-3)
    hf, described = (json.loads((folder / "config.json").read_text()), CONFIGS[golden["checkpoint"]])
    is_untied = name in ("rslora_patterns", "tables", "dora")  # the head or the table of one that was tied
    assert hf == (described | {"tie_word_embeddings": False} if is_untied else described)


def test_scores_of_a_classifier_are_those_of_peft(tmp_path, monkeypatch):
    golden, folder = merged("classifier", tmp_path)
    monkeypatch.setattr("tests.models.paged.model_for", lambda hf: pooling_model(model_for(hf), "classify"))
    scores = PagedModel(folder).logits(prompt_of("qwen2"))[-1]
    np.testing.assert_allclose(scores, golden["labels"], rtol=1e-4, atol=2e-4)
