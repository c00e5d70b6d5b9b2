"""The least that programs move, against sums done by hand."""

from dataclasses import replace

from jaxpaged.models import stages
from jaxpaged.models.registry import model_for
from jaxpaged.tools.counting.minimum import activations_of, minimum_of
from jaxpaged.worker.costs import Work
from tests.models.checkpoints import CONFIGS

WORK = Work(
    num_shards=2,
    weight_bytes=1000,
    params=500,
    head_params=50,
    head_bytes=100,
    attention_layers=((None, 2, 8), (4, 1, 8)),
    heads=64,
    reduced_bytes=0,
    expert_bytes=400,
    expert_share=0.5,
)


def decoder_of(name):
    return model_for(CONFIGS[name]).config_from_hf(CONFIGS[name])


def test_a_program_needs_its_weights_its_tokens_and_its_logits_once():
    decoder = replace(decoder_of("llama"), vocab_size=30)
    forward = minimum_of(WORK, decoder, 2, 3, 77.0, layers=True, draws=False)
    met = 1000 - 400 * 0.5**3
    assert (forward.weights, forward.logits) == (met - 100, 0)
    assert (forward.kv_written, forward.kv_read) == (3 * 3 * 8, 77.0)
    assert forward.activations == 3 * 2 * activations_of(decoder, 2)
    draw = minimum_of(WORK, decoder, 2, 3, 77.0, layers=False, draws=True)
    assert (draw.weights, draw.logits) == (100, 2 * 3 * 30 * 4 / 2)
    assert draw.activations == draw.kv_read == draw.kv_written == 0
    decode = minimum_of(WORK, decoder, 2, 3, 77.0, layers=True, draws=True)
    assert decode.weights == met and decode.logits == draw.logits


def test_activations_are_what_blocks_hand_on():
    llama, experts = decoder_of("llama"), decoder_of("qwen2_moe")
    heads = 2 * llama.num_heads * llama.head_dim + 4 * llama.num_kv_heads * llama.head_dim
    layer = 4 * llama.hidden_size + heads / 2 + 2 * llama.intermediate_size / 2
    extra = 2 * llama.num_heads * llama.head_dim / 2  # queries, and what attention gives
    assert activations_of(llama, 2) == llama.num_layers * (layer + extra)
    kind = experts.experts
    wider = replace(experts, experts=replace(kind, width=kind.width + 10))
    more = 2 * 10 * kind.router.experts_per_token * len(kind.layers)
    assert activations_of(wider, 1) - activations_of(experts, 1) == more


def test_stages_hand_on_what_the_whole_model_does():
    whole = decoder_of("deepseek_v3")
    parts = [stages.decoder_of(stage, whole) for stage in stages.deal_layers(whole.num_layers, 2)]
    assert sum(activations_of(part, 1) for part in parts) == activations_of(whole, 1)
