"""Every field of every config.json, of a wrong kind or missing: the error is a CheckpointError that names the field."""

import copy
import math

import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.models import config as config_module
from jaxpaged.models.registry import model_for
from tests.models.checkpoints import CONFIGS
from tests.models.encoder_checkpoints import CHECKPOINTS as ENCODER_CONFIGS
from tests.models.seeing_checkpoints import SEEING

EVERY = {**CONFIGS, **ENCODER_CONFIGS, **SEEING}
FIRST = {hf["architectures"][0]: name for name, hf in reversed(EVERY.items())}
"""Architecture -> a config.json of it."""
OF_NO_FIELD = ({"x": [[]]}, [{}], -7.5)
"""Values that no field has, whatever its kind."""
OF_SOME = (
    None,
    True,
    False,
    -1,
    0,
    1,
    1.5,
    2000,
    "",
    [],
    [None],
    [[]],
    [-1],
    {},
    {"x": 1},
    math.nan,
    math.inf,
    10**400,
)
OTHER_NAMES = {
    "torch_dtype": "dtype",
    "rope_type": "rope type",
    "block_ff_dim": "intermediate_size",
    "hidden_activation": "hidden_act",
    "layernorm_epsilon": "rms_norm_eps",
    "tie_embedding": "tie_word_embeddings",
    "hybrid_layer_pattern": "layer_types",
    "moe_layer_freq": "mlp_layer_types",
}
"""What errors may call a field that means the same in another spelling."""
OBJECTS = {
    *("rope_parameters", "rope_scaling", "text_config", "vision_config", "full_attention", "sliding_attention"),
    *("quantization_config", "compression_config", "swa_rope_parameters"),
}
"""Fields that hold fields, of which an error names a wrong one."""


def parse(hf):
    hash(model_for(hf).config_from_hf(hf))


def at(hf, path):
    for name in path:
        hf = hf.get(name) if isinstance(hf, dict) else None
    return hf


def changed(hf, path, *value):
    """config.json with another value of a field, or without it."""
    made = copy.deepcopy(hf)
    *outer, name = path
    holder = at(made, outer)
    holder.pop(name, None)
    if value:
        (holder[name],) = value
    return made


def paths(hf, before=()):
    for name, value in hf.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from paths(value, (*before, name))


def paths_read(hf, monkeypatch):
    """The fields that it has, and those that its reader asks for."""
    readers, plain = [], config_module.HfFields.__init__
    monkeypatch.setattr(config_module.HfFields, "__init__", lambda self, hf: (plain(self, hf), readers.append(self))[0])
    parse(hf)
    monkeypatch.undo()
    own = [*paths(hf)]
    before = ("text_config",) if "text_config" in hf else ()
    further = {name for reader in readers for name in reader.read} - {path[-1] for path in own}
    return own, [(*before, name) for name in sorted(further)]


def check(hf, path, *value):
    try:
        parse(changed(hf, path, *value))
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("architecture", FIRST)
def test_a_field_of_a_wrong_kind_is_an_error_that_names_it(architecture, monkeypatch):
    hf = EVERY[FIRST[architecture]]
    own, further = paths_read(hf, monkeypatch)
    for path in [*own, *further]:
        check(hf, path)
        found, name = at(hf, path), path[-1]
        lists = [[each] * len(found) for each in OF_NO_FIELD] if isinstance(found, list) else []
        for value in (*OF_NO_FIELD, *lists):
            said = check(hf, path, value)
            chooses = name == "model_type" or (said and "config.json describes" in said)
            holds_fields = name in OBJECTS and isinstance(value, dict)
            if said and not chooses and not holds_fields:
                assert name in said or OTHER_NAMES.get(name, name) in said, (path, value, said)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EVERY)
def test_no_value_of_a_field_is_an_error_of_another_kind(name, monkeypatch):
    hf = EVERY[name]
    own, further = paths_read(hf, monkeypatch)
    for path in [*own, *further]:
        length = len(found) if isinstance(found := at(hf, path), list) else hf.get("num_hidden_layers", 1)
        for value in (*OF_NO_FIELD, *OF_SOME):
            check(hf, path, value)
            check(hf, path, [value] * length)
