"""Adapters that PEFT wrote, merged into the weights, against the logits of PEFT's own models."""

import json

import numpy as np
import pytest

from tests.models.adapted import GOLDEN, read, specs_of, with_adapter, write_base
from tests.models.checkpoints import prompt_of
from tests.models.paged import PagedModel, max_model_len_of

NAMES = sorted(path.name for path in GOLDEN.iterdir())
GENERATING = [name for name in NAMES if name != "classifier"]


def golden_of(name):
    return json.loads((GOLDEN / name / "logits.json").read_text())


@pytest.mark.parametrize("name", GENERATING)
def test_logits_are_those_of_peft(name, tmp_path):
    golden = golden_of(name)
    base = write_base(golden["checkpoint"], tmp_path)
    model = PagedModel(base, max_model_len=max_model_len_of(golden["checkpoint"]))
    specs, _ = specs_of(base)
    model.params = with_adapter(model.params, specs, read(GOLDEN / name, base))
    logits = model.logits(prompt_of(golden["checkpoint"]))
    for position, top in golden["top"].items():
        np.testing.assert_allclose(logits[int(position)][top["ids"]], top["logits"], rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(logits.sum(axis=1), golden["sums"], rtol=1e-4, atol=4e-3)
