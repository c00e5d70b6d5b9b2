"""Architecture name in config.json -> the module that implements it.

A checkpoint made for pooling is that of a language model with another head, or with none: its architecture is called
after the same model, with the end ForSequenceClassification or Model.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.models.arcee import APERTUS, ARCEE
from jaxpaged.models.bert import BERT, ROBERTA
from jaxpaged.models.cohere import COHERE, COHERE2
from jaxpaged.models.config import DecoderConfig, architecture_of, short
from jaxpaged.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, KIMI_K25
from jaxpaged.models.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from jaxpaged.models.exaone4 import EXAONE4
from jaxpaged.models.gemma2 import GEMMA2
from jaxpaged.models.gemma3 import GEMMA3
from jaxpaged.models.gemma4 import GEMMA4
from jaxpaged.models.glm4 import GLM4, GLM4_MOE
from jaxpaged.models.gpt_oss import GPT_OSS
from jaxpaged.models.granite import GRANITE
from jaxpaged.models.interface import Model
from jaxpaged.models.laguna import LAGUNA
from jaxpaged.models.lfm2 import LFM2, LFM2_MOE
from jaxpaged.models.llama import LLAMA, MISTRAL
from jaxpaged.models.llama4 import LLAMA4
from jaxpaged.models.mimo import MIMO
from jaxpaged.models.mimo_v2 import MIMO_V2
from jaxpaged.models.minimax_m2 import HY_V3, MINIMAX_M2
from jaxpaged.models.mistral3 import MINISTRAL3, MISTRAL3, PIXTRAL, is_pixtral
from jaxpaged.models.mistral4 import MISTRAL4, WRAPPED_MISTRAL4
from jaxpaged.models.mixtral import MIXTRAL
from jaxpaged.models.modernbert import MODERNBERT
from jaxpaged.models.muse_glimmer import MUSE_GLIMMER
from jaxpaged.models.olmo2 import OLMO2, OLMO3
from jaxpaged.models.phi3 import PHI3
from jaxpaged.models.qwen2 import QWEN2
from jaxpaged.models.qwen3 import QWEN3
from jaxpaged.models.qwen_moe import QWEN2_MOE, QWEN3_MOE
from jaxpaged.models.qwen_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_VL, QWEN3_VL_MOE
from jaxpaged.models.seed_oss import SEED_OSS
from jaxpaged.models.seeing import seeing_model
from jaxpaged.models.smollm3 import SMOLLM3
from jaxpaged.models.unsupported import architecture_error, tower_error
from jaxpaged.models.wrapped import text_part
from jaxpaged.params.encoded import encoded_specs
from jaxpaged.params.schemes import reading

MODELS: dict[str, Model] = {
    name: model
    for model in (
        LLAMA,
        MISTRAL,
        MISTRAL3,
        PIXTRAL,
        MIXTRAL,
        QWEN2,
        QWEN3,
        QWEN2_MOE,
        QWEN3_MOE,
        QWEN2_VL,
        QWEN2_5_VL,
        QWEN3_VL,
        QWEN3_VL_MOE,
        MIMO,
        GEMMA2,
        GEMMA3,
        PHI3,
        GLM4,
        GLM4_MOE,
        OLMO2,
        OLMO3,
        GRANITE,
        SMOLLM3,
        SEED_OSS,
        EXAONE4,
        COHERE,
        GPT_OSS,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        KIMI_K25,
        LLAMA4,
        LFM2,
        LFM2_MOE,
        ARCEE,
        APERTUS,
        ERNIE4_5,
        ERNIE4_5_MOE,
        COHERE2,
        MINIMAX_M2,
        HY_V3,
        MINISTRAL3,
        MISTRAL4,
        GLM4_MOE_LITE,
        GEMMA4,
        MIMO_V2,
        MUSE_GLIMMER,
        LAGUNA,
    )
    for name in model.architectures
}
"""Every supported architecture that generates."""

ENCODERS: dict[str, Model] = {name: model for model in (BERT, ROBERTA, MODERNBERT) for name in model.architectures}
"""Every supported architecture that only pools."""

WRAPPED = {("Mistral3ForConditionalGeneration", "mistral4"): WRAPPED_MISTRAL4}
"""An architecture that wraps a language model of several kinds, and its `model_type` -> the model, where it is another
than that in `MODELS`."""

GENERATES, CLASSIFIES, EMBEDS = "ForCausalLM", "ForSequenceClassification", ("Model", "ForMaskedLM")
ALSO_SEES = "ForConditionalGeneration"
MAX_LABELS = 100_000


def model_for(
    hf: dict[str, Any], language_model_only: bool = False, models: Mapping[str, Model] = MappingProxyType(MODELS)
) -> Model:
    """The model of a raw config.json, with its tower if it has one and it is not `language_model_only`. `models` are
    those that may be meant, by architecture.

    CheckpointError saying what it is and what would serve when there is none.
    """
    model = plain_model_for(hf, language_model_only, models)
    if not reading.is_described(hf):
        return model
    mtp = model.mtp and replace(model.mtp, param_specs=partial(stored_specs, model.mtp.param_specs))
    classifier = model.classifier and replace(
        model.classifier, specs=partial(stored_classifier_specs, model.classifier.specs)
    )
    return replace(model, param_specs=partial(stored_specs, model.param_specs), mtp=mtp, classifier=classifier)


def stored_specs(param_specs: Callable[[DecoderConfig, int], Any], config: DecoderConfig, num_model_shards: int) -> Any:
    """Specs of parameters with the schemes by which a quantised checkpoint stores them."""
    return encoded_specs(param_specs(config, num_model_shards), config.quantization)


def stored_classifier_specs(specs: Callable[[DecoderConfig], Any], config: DecoderConfig) -> Any:
    """The same of a classifier, which is stored otherwise only where it is named: quantisers leave it as it was."""
    return encoded_specs(specs(config), config.quantization and config.quantization.only_named())


def plain_model_for(hf: dict[str, Any], language_model_only: bool, models: Mapping[str, Model]) -> Model:
    """The same for a checkpoint that nobody quantised."""
    name = architecture_of(hf)
    model = models.get(generating_name(name)) or ENCODERS.get(name)
    if model is MODELS.get(generating_name(name)):  # and none of a plugin
        model = WRAPPED.get((name, str(text_part(hf).get("model_type"))), model)
    if model is None or (model is PIXTRAL and not is_pixtral(hf)):
        raise architecture_error(name, hf, [*models, *ENCODERS])
    if task_of(name) == "classify":
        return replace(model, config_from_hf=partial(classifier_config, model.config_from_hf))
    if language_model_only:
        return replace(model, vision=None)
    if model.vision is None:
        if name.endswith(ALSO_SEES) and hf.get("vision_config"):
            raise tower_error(name)
        return model
    if model.vision.config_from_hf(hf) is None:
        return replace(model, vision=None)
    return seeing_model(model)


def generating_name(name: str) -> str:
    """The architecture with the same layers that generates. Gemma 3's without images is called "Text" only here."""
    for end in (CLASSIFIES, "Model"):
        if name.endswith(end):
            return f"{name.removesuffix(end).removesuffix('Text')}{GENERATES}"
    return name


def task_of(architecture: str) -> str:
    """What checkpoints of an architecture are made for: "generate", "embed" or "classify". Encoders that guess words
    embed."""
    if architecture.endswith(CLASSIFIES):
        return "classify"
    return "embed" if architecture.endswith(EMBEDS) else "generate"


def classifier_config(read: Callable[[dict[str, Any]], DecoderConfig], hf: dict[str, Any]) -> DecoderConfig:
    """DecoderConfig with the number of labels: the entries of `id2label`, or `num_labels`, or 2 as in transformers."""
    names = hf.get("id2label")
    count = len(names) if isinstance(names, dict) else hf.get("num_labels", 2)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_LABELS:
        raise CheckpointError(f"config.json: num_labels is {short(count)}; it must be from 1 to {MAX_LABELS}.")
    return replace(read(hf), num_labels=count)
