"""Which layers of a model a stage of a pipeline has, and the parts of its description and of its parameters.

The first stage has the embeddings, the last one the final norm and the head. Where both are one table each has a copy.
"""

from dataclasses import dataclass, replace
from typing import Any

from jaxpaged.errors import ConfigError
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.pooling import PoolingModel


@dataclass(frozen=True)
class Stage:
    """Neighbouring layers of a model."""

    layers: range
    is_first: bool
    is_last: bool


def deal_layers(num_layers: int, num_stages: int) -> tuple[Stage, ...]:
    """The layers in order, as evenly as they go. The last stage, which has the head too, is the last to have one more,
    and before it the first one. Raises ConfigError when there are fewer layers than stages."""
    if num_layers < num_stages:
        raise ConfigError(
            f"pipeline_parallel_size is {num_stages}, but the model has {num_layers} layers, and each stage needs one. "
            "Lower it."
        )
    least, more = divmod(num_layers, num_stages)
    stages, begin = [], 0
    for i in range(num_stages):
        end = begin + least + (num_stages - 1 - more <= i < num_stages - 1)
        stages.append(Stage(range(begin, end), i == 0, i == num_stages - 1))
        begin = end
    return tuple(stages)


def decoder_of(stage: Stage, decoder: DecoderConfig) -> DecoderConfig:
    """The description of a model that has the layers of this stage only."""
    layers, experts = tuple(decoder.layers[i] for i in stage.layers), decoder.experts
    if experts is not None:
        experts = replace(experts, layers=tuple(i - stage.layers.start for i in experts.layers if i in stage.layers))
    return replace(decoder, num_layers=len(layers), layers=layers, experts=experts)


def params_of(stage: Stage, params: Any) -> Any:
    """The parameters of a stage, or their specs, from those of the whole model."""
    if isinstance(params, PoolingModel):
        decoder = part_of(stage, params.decoder, is_read_twice=False)
        return PoolingModel(decoder, params.score if stage.is_last else None)
    return part_of(stage, params, is_read_twice=params.lm_head is None)


def part_of(stage: Stage, params: Decoder, is_read_twice: bool) -> Decoder:
    """`is_read_twice`: the embeddings are the head too."""
    return Decoder(
        embed_tokens=params.embed_tokens if stage.is_first or (stage.is_last and is_read_twice) else None,
        layers=[params.layers[i] for i in stage.layers],
        norm=params.norm if stage.is_last else None,
        lm_head=params.lm_head if stage.is_last else None,
    )
