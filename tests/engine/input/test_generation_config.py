import json

import pytest

from jaxpaged.engine.input.generation_config import load_generation_defaults
from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.sampling_params import SamplingParams


def write(folder, **entries):
    (folder / "generation_config.json").write_text(json.dumps(entries))
    return folder


def test_a_model_without_the_file_has_the_usual_defaults(tmp_path):
    defaults = load_generation_defaults(tmp_path)
    assert defaults.sampling_params() == SamplingParams()
    assert defaults.eos_token_ids == ()


def test_sampling_fields_and_end_ids_are_read(tmp_path):
    write(tmp_path, temperature=0.6, top_p=0.9, top_k=None, max_new_tokens=99, do_sample=True, eos_token_id=[7, 9])
    defaults = load_generation_defaults(tmp_path)
    assert defaults.sampling_params() == SamplingParams(temperature=0.6, top_p=0.9, max_tokens=99)
    assert defaults.eos_token_ids == (7, 9)


def test_vllm_defaults_leave_out_the_sampling_fields_but_not_the_end_ids(tmp_path):
    write(tmp_path, temperature=0.6, eos_token_id=7)
    defaults = load_generation_defaults(tmp_path, "vllm", {"top_k": 3})
    assert (dict(defaults.sampling), defaults.eos_token_ids) == ({"top_k": 3}, (7,))


def test_overrides_win(tmp_path):
    write(tmp_path, temperature=0.6, top_p=0.9, eos_token_id=7)
    defaults = load_generation_defaults(tmp_path, "auto", {"temperature": 0.1, "eos_token_id": [8]})
    assert (dict(defaults.sampling), defaults.eos_token_ids) == ({"temperature": 0.1, "top_p": 0.9}, (8,))


def test_end_ids_may_stand_in_the_model_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert load_generation_defaults(tmp_path).eos_token_ids == (5,)


def test_sampling_fields_of_an_old_model_config_are_read_where_there_is_no_file_for_them(tmp_path):
    """But not those that once stood in every one."""
    old = {"temperature": 0.7, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.2, "do_sample": True, "num_beams": 1}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert dict(load_generation_defaults(tmp_path).sampling) == {"temperature": 0.7, "repetition_penalty": 1.2}
    assert dict(load_generation_defaults(tmp_path, "vllm").sampling) == {}
    write(tmp_path, top_p=0.9)
    assert dict(load_generation_defaults(tmp_path).sampling) == {"top_p": 0.9}
    write(tmp_path)
    assert dict(load_generation_defaults(tmp_path).sampling) == {}


def test_unknown_overrides_are_named_with_the_nearest_known_one(tmp_path):
    with pytest.raises(ConfigError, match=r"'temprature'\. Did you mean 'temperature'"):
        load_generation_defaults(tmp_path, "auto", {"temprature": 1})


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"top_p": 2}, "top_p"),
    ],
)
def test_values_that_cannot_be_are_the_checkpoints_fault(tmp_path, entries, said):
    with pytest.raises(CheckpointError, match=said):
        load_generation_defaults(write(tmp_path, **entries))


def test_overrides_that_cannot_be_are_the_users_fault(tmp_path):
    with pytest.raises(ConfigError, match="override_generation_config.*min_p is 7"):
        load_generation_defaults(tmp_path, "auto", {"min_p": 7})
