"""The part of a config.json that describes a language model, where another part describes what sees for it."""

from typing import Any

from jaxpaged.models.config import HfFields

OF_IMAGES = frozenset(
    """
    text_config vision_config mm_tokens_per_image image_token_index boi_token_index eoi_token_index image_token_id
    boi_token_id eoi_token_id model_type initializer_range transformers_version
    spatial_merge_size vision_feature_layer projector_hidden_act multimodal_projector_bias
    vision_feature_select_strategy image_seq_length
    media_placeholder_token_id ignore_index use_unified_vision_chunk video_placeholder
    audio_config audio_token_id boa_token_id eoa_token_id eoa_token_index vision_soft_tokens_per_image
    out_hidden_size projector_hidden_size
    vision_start_token_id vision_end_token_id vision_token_id video_token_id
    """.split()
)
"""Fields beside `text_config` that say nothing of the language model."""


def text_part(hf: dict[str, Any]) -> dict[str, Any]:
    """The fields of the language model. Some stand beside its part, and win over those in it."""
    if hf.get("text_config") is None:
        return hf
    text = HfFields(hf).mapping("text_config")
    beside = {name: value for name, value in hf.items() if name not in OF_IMAGES and value is not None}
    return {**text, **beside}
