"""An engine as a sampler of Tunix: its interface, what it answers, and weights that come as Tunix has them."""

import abc
import sys
import types

import jax
import numpy as np
import pytest
from safetensors.flax import load_file

from jaxpaged import LLM, SamplingParams
from jaxpaged.entrypoints.tunix import BASE, TunixSampler, prompt_width
from jaxpaged.errors import CheckpointError, RequestError, UsageError
from jaxpaged.params.framework_trees import Named, tree_of
from jaxpaged.params.hub import EMBEDDED_FOLDER


class BaseSampler(abc.ABC):
    """Has the methods that Tunix's class of this name has."""

    @abc.abstractmethod
    def tokenize(self, input_string): ...


@pytest.fixture(scope="module")
def llm():
    llm = LLM("demo", dtype="float32", max_model_len=64, max_num_seqs=4, token_buckets=(4, 32))
    yield llm
    llm.shutdown()


@pytest.fixture
def sampler(llm, monkeypatch):
    module = types.ModuleType(BASE)
    module.BaseSampler = BaseSampler
    monkeypatch.setitem(sys.modules, BASE, module)
    return TunixSampler(llm)


def test_it_counts_as_a_sampler_and_answers_like_one(sampler, llm):
    assert isinstance(sampler, BaseSampler) and sampler.transformer is None
    prompts = ["The capital of France is", "Once"]
    output = sampler(prompts, 5, max_prompt_length=16)
    wanted = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0.0))
    assert [list(each) for each in output.tokens] == [list(each.outputs[0].token_ids) for each in wanted]
    assert output.text == [each.outputs[0].text for each in wanted] and output.logits is None
    assert [len(each) for each in output.logprobs] == [len(each) for each in output.tokens]
    assert all(value <= 0 for each in output.logprobs for value in each)
    assert output.padded_prompt_tokens.shape == (2, 16)
    for row, prompt in zip(output.padded_prompt_tokens, prompts):
        ids = sampler.tokenize(prompt)
        assert list(row[-len(ids) :]) == ids and set(row[: -len(ids)]) <= {sampler.pad_id}
    padded = sampler(prompts[1], 5, echo=True, pad_output=True)
    width = prompt_width([sampler.tokenize(prompts[1])], None)
    assert padded.tokens.shape == (1, 5 + width) and padded.text[0].startswith("Once")
    assert (prompt_width([[1] * 5], None), prompt_width([[1] * 8], 4), prompt_width([[1]], 7)) == (8, 8, 7)


def test_it_takes_what_tunixs_own_rollout_gives_it(sampler):
    """`VanillaRollout` names the tokens that end answers, and whether it wants log probabilities."""
    [whole] = sampler("The capital of France is", 5).tokens
    cut = sampler("The capital of France is", 5, eos_tokens=[int(whole[1])], return_logprobs=False)
    assert cut.tokens[0].tolist() == whole[:2].tolist() and cut.logprobs is None


def test_draws_follow_the_seed_and_beams_are_searched(sampler):
    first, again = (sampler("Once", 6, temperature=1.0, top_p=0.9, top_k=20, seed=5) for _ in range(2))
    np.testing.assert_array_equal(first.tokens[0], again.tokens[0])
    assert first.logprobs == again.logprobs
    searched = sampler("Once", 3, beam_size=2)
    assert len(searched.tokens[0]) == 3 and searched.logprobs is None


def test_what_it_cannot_do_is_refused(sampler):
    with pytest.raises(RequestError, match="multi_sampling is 2. Repeat the prompts"):
        sampler("Once", 3, multi_sampling=2)
    with pytest.raises(RequestError, match="return_logits is given"):
        sampler("Once", 3, return_logits=True)
    with pytest.raises(RequestError, match="max_model_len = 64"):
        sampler("Once " * 80, 3)
    with pytest.raises(UsageError, match="whole weights are taken"):
        sampler.update_params({}, filter_types=(type("LoRAParam", (), {}),))


def demo_tree(llm):
    """The embedded model's weights, as Tunix has them."""
    stage = llm.collective_rpc(lambda worker: worker.stages[-1])[0]
    tensors = {name: np.asarray(tensor) for name, tensor in load_file(EMBEDDED_FOLDER / "model.safetensors").items()}
    return tree_of(tensors, "tunix", Named.of(stage.decoder, jax.tree.leaves(stage.specs)))


def test_weights_come_as_tunix_has_them(sampler, llm):
    before, tree = sampler("The capital of France is", 5), demo_tree(llm)
    sampler.update_params(tree, filter_types=(type("Param", (), {}),))
    after = sampler("The capital of France is", 5)
    assert after.text == before.text and after.logprobs == before.logprobs
    assert llm.get_weight_version() == "update 1"
    tree["final_norm"]["scale"] = tree["final_norm"]["scale"] * 3
    sampler.load_checkpoint(tree)
    assert sampler("The capital of France is", 5).logprobs != before.logprobs
    with pytest.raises(CheckpointError, match="the tree lacks"):
        sampler.update_params({"final_norm": tree["final_norm"]})
    assert sampler.transformer_state is not None
