"""Fields of config.json that no architecture reads, and what they may hold without changing any result.

Everything else that nobody reads is an error: `HfFields.refuse_unread`.
"""

import re
from collections.abc import Container, Mapping
from typing import Any

HARMLESS_FIELDS = frozenset(
    """
    architectures model_type transformers_version torch_dtype dtype use_cache initializer_range auto_map name_or_path
    attention_dropout hidden_dropout resid_pdrop embd_pdrop classifier_dropout output_attentions output_hidden_states
    return_dict return_dict_in_generate torchscript tokenizer_class pad_token_id sep_token_id decoder_start_token_id
    finetuning_task task_specific_params max_length do_sample early_stopping output_scores remove_invalid_values
    chunk_size_feed_forward tf_legacy_loss use_bfloat16 attn_implementation pretraining_tp is_llama_config
    output_router_logits router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux residual_dropout
    hybrid_kvcache_attention_pattern unsloth_fixed unsloth_version transformers.js_config
    max_sequence_length model_max_length tokenizer_model_max_length
    _name_or_path _commit_hash _from_model_config _flash_attn_2_enabled _attn_implementation_autoset
    _attn_implementation_internal _pre_quantization_dtype
    """.split()
)
"""They are of training, of the form of results, or records."""

READ_BY_OTHERS = frozenset(
    """
    bos_token_id eos_token_id temperature top_k top_p repetition_penalty
    id2label label2id problem_type num_labels is_matryoshka matryoshka_dimensions sentence_transformers
    sbert_ce_default_activation_function
    """.split()
)
"""They say how texts end, how tokens are drawn (`engine/input/generation_config.py`), and what a pooled vector becomes
(`engine/pooling/pooler.py`)."""

NEUTRAL_VALUES: Mapping[str, Container[Any]] = {
    **dict.fromkeys(
        ("full_attn_mod", "interpolate_factor", "num_beams", "num_beam_groups", "num_return_sequences"), (1,)
    ),
    **dict.fromkeys(("typical_p", "length_penalty", "encoder_repetition_penalty"), (1,)),
    "cache_implementation": ("static", "dynamic", "hybrid", "hybrid_chunked", "sliding_window", "offloaded"),
}
"""Fields that change nothing as long as they have one of these values, or none: ways to draw tokens, and where a cache
lies."""

ON_UNLESS_SAID = frozenset(("is_causal", "causal", "use_causal_mask", "use_rope", "use_rotary"))
"""Fields of which false is the value that changes something: others are switched off by it, or empty."""

IMPLEMENTATION = re.compile(r"_\w+_implementation")
"""Names of fields that say which of several equal functions is called."""


def changes_nothing(name: str, value: Any) -> bool:
    """Whether a field that no architecture has read means the same as if it were not there."""
    if value is None or name in HARMLESS_FIELDS or name in READ_BY_OTHERS or IMPLEMENTATION.fullmatch(name):
        return True
    return name not in ON_UNLESS_SAID if not value else value in NEUTRAL_VALUES.get(name, ())
