"""The list of supported models says what the registry, the readers of weights and the goldens say."""

import jax
import pytest

from jaxpaged.models.known import KNOWN, LANGUAGE_MODEL_ONLY, PICTURES, TEXT
from jaxpaged.models.registry import ALSO_SEES, ENCODERS, MODELS, model_for
from jaxpaged.params.gguf_folder.architectures import ARCHITECTURES, DEEPSEEK_V3, MISTRAL4, VARIANTS
from jaxpaged.params.schemes.reading import READERS
from jaxpaged.params.spec import Spec
from tests.models.checkpoints import CONFIGS
from tests.models.encoder_checkpoints import CHECKPOINTS
from tests.models.quantised_checkpoints import FORMATS
from tests.models.seeing_checkpoints import SEEING

GOLDEN = {hf["architectures"][0]: hf for hf in (*CONFIGS.values(), *SEEING.values(), *CHECKPOINTS.values())}
"""Architecture -> config.json of a checkpoint of which transformers computed the logits."""
OTHER_NAMES = {"modelopt_fp4": "modelopt"}
METHODS = {hf["quant_method"]: hf for _, _, hf in FORMATS.values()} | {"mxfp4": {"quant_method": "mxfp4"}}
by_name = pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.architecture)


def test_every_architecture_is_listed_once():
    encoders = [name for name in ENCODERS if not name.endswith("ForMaskedLM")]
    assert sorted(known.architecture for known in KNOWN) == sorted([*MODELS, *encoders])
    assert {known.architecture for known in KNOWN if known.pools_only} == set(encoders)
    models = [(known.reads, name) for known in KNOWN for name in known.models]
    assert len(models) == len(set(models))


def test_what_a_model_reads_is_what_its_record_can_read():
    reads = {
        name: (PICTURES if model.vision else LANGUAGE_MODEL_ONLY) if name.endswith(ALSO_SEES) else TEXT
        for name, model in MODELS.items()
    }
    assert {known.architecture: known.reads for known in KNOWN if not known.pools_only} == reads
    assert {known.reads for known in KNOWN if known.pools_only} == {TEXT}


def test_every_format_that_is_read_is_listed():
    assert {name for known in KNOWN for name in known.formats} == {OTHER_NAMES.get(n, n) for n in READERS} - {"gguf"}


def test_files_in_gguf_are_those_of_the_architectures_that_name_them():
    """Those of models with another's layers may be called after it. Of models that see, files hold another one."""
    found = {known.architecture: known.gguf for known in KNOWN if known.gguf and known.reads == TEXT}
    seeing = {known.gguf for known in KNOWN if known.gguf and known.reads != TEXT}
    assert seeing == {kind for kind in ARCHITECTURES if "vl" in kind}
    roberta = [known.architecture for known in KNOWN if "Roberta" in known.architecture]
    assert {found.pop(name) for name in roberta} == {"bert"}, "the same layers, and scores under other names"
    assert found.pop("Glm4MoeLiteForCausalLM") == found.pop(DEEPSEEK_V3.name) == "deepseek2"
    read = [(kind, each) for kind, own in VARIANTS.items() for each in own.values() if each is not MISTRAL4]
    named = {each.name: kind for kind, each in (*read, *ARCHITECTURES.items()) if kind not in seeing}
    assert found == {**named, "MistralForCausalLM": "llama"}


@by_name
def test_every_format_names_tensors_of_every_model_that_takes_it(known):
    hf = GOLDEN.get(known.architecture)
    if hf is None:
        models = MODELS | ENCODERS
        same = models[known.architecture].forward
        assert any(models[name].forward is same for name in GOLDEN if name in models), "and no golden"
        return
    for method in known.formats:
        described = {**hf, "quantization_config": METHODS[method]}
        model = model_for(described)
        specs = model.param_specs(model.config_from_hf(described), 1)
        schemes = [spec.scheme for spec in jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, Spec))]
        assert sum(scheme is not None for scheme in schemes) >= 2, method
