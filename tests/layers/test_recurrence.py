"""Recurrence backends of a stranger's: one that computes, some that fail, and engines that name them."""

import numpy as np
import pytest

from jaxpaged import LLM
from jaxpaged.config import EngineConfig
from jaxpaged.entrypoints.cli import main
from jaxpaged.errors import ConfigError, ProgramError
from jaxpaged.layers.short_conv import on_device
from tests.layers.test_short_conv import Steps, expected, inputs_of
from tests.models.checkpoints import write_checkpoint
from tests.worker.test_engine_spec import engine_spec


class Ours:
    def __init__(self):
        self.num_traced = 0

    def why_not(self, platform):
        return None if platform == "cpu" else "it is for tests"

    def short_conv(self, *operands):
        self.num_traced += 1
        return on_device(*operands)


class Raises(Ours):
    def short_conv(self, *operands):
        raise RuntimeError("no kernel for such rings")


class LosesSnapshots(Ours):
    def short_conv(self, *operands):
        return (*on_device(*operands)[:2], np.zeros(3, np.float32))


class ElsewhereOnly(Ours):
    def why_not(self, platform):
        return "it needs another machine"


BACKEND, RAISES, LOSES, ELSEWHERE = Ours(), Raises(), LosesSnapshots(), ElsewhereOnly()
place = lambda name: f"{__name__}:{name}"


def test_it_computes_what_layers_with_states_have_of_their_own():
    before, [given] = BACKEND.num_traced, Steps(4, recurrence=place("BACKEND")).run([(0, inputs_of(0)[:5], 0)])
    np.testing.assert_allclose(given, expected(0)[:5], rtol=1e-5, atol=1e-5)
    assert BACKEND.num_traced > before


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("RAISES", RuntimeError, "no kernel for such rings"),
        ("LOSES", ValueError, r"LOSES' gave .*float32\[3\].* must give"),
    ],
)
def test_what_it_gives_is_checked_where_it_is_traced(name, error, words):
    with pytest.raises(error, match=words):
        Steps(1, recurrence=place(name)).run([(0, inputs_of(0)[:5], 0)])


def test_backends_that_cannot_be_are_named_before_anything_is_compiled(tmp_path):
    folders = {name: write_checkpoint(name, tmp_path / name) for name in ("lfm2", "llama")}
    spec = lambda name, **options: engine_spec(folders[name], block_size=8, **options)
    assert spec("lfm2", recurrence_backend=place("BACKEND")).fingerprint()["options.recurrence_backend"] != "reference"
    for model, options, words in (
        ("lfm2", {"recurrence_backend": "no.such:BACKEND"}, "cannot be imported: ModuleNotFoundError"),
        ("lfm2", {"recurrence_backend": place("place")}, "has no why_not, short_conv. It needs why_not, short_conv"),
        ("lfm2", {"recurrence_backend": place("ELSEWHERE")}, "cannot run on 'cpu': it needs another machine"),
        ("llama", {"recurrence_backend": place("BACKEND")}, "LlamaForCausalLM has no layer with a state"),
        ("lfm2", {"recurrence_backend": place("BACKEND"), "deterministic": True}, "deterministic needs our own"),
    ):
        with pytest.raises(ConfigError, match=words):
            spec(model, **options).fingerprint()
    with pytest.raises(ConfigError, match="recurrence_backend is 'mine'; it must be"):
        EngineConfig.from_options(recurrence_backend="mine")


def test_the_list_of_plugins_shows_it(capsys):
    assert main(["plugins", "--plugins", "", "--recurrence-backend", place("BACKEND")]) == 0
    assert "recurrence backend: Ours" in capsys.readouterr().out
    assert main(["plugins", "--plugins", "", "--attention-backend", "no.such:BACKEND"]) == 1
    assert "'no.such:BACKEND' cannot be imported: ModuleNotFoundError" in capsys.readouterr().err


@pytest.mark.slow
def test_one_that_raises_stops_the_start_of_an_engine(tmp_path):
    options = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "token_buckets": (16,)}
    options |= {"skip_tokenizer_init": True, "num_gpu_blocks_override": 14, "block_size": 8}
    with pytest.raises(ProgramError, match="no kernel for such rings"):
        LLM(str(write_checkpoint("lfm2", tmp_path)), recurrence_backend=place("RAISES"), **options)
