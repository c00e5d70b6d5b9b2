"""Quantised checkpoints that are damaged, or are not as their config.json says: one error that names what and where."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.params.schemes.reading import quantization_of, rounding_of
from tests.models.paged import PagedModel
from tests.models.quantised_checkpoints import FORMATS, read, write_quantised

Q, O, DOWN = (f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"))
SOME = np.ones((64, 64), np.float32)


def at(place, value):
    """A change of one number."""

    def change(tensor):
        changed = tensor.copy()
        changed[place] = value
        return changed

    return change


def byte_at(place, value):
    return lambda tensor: at(place, value)(tensor.view(np.uint8)).view(tensor.dtype)


# kind of checkpoint, tensor, what becomes of it (None: it goes), words of the error
DAMAGE = {
    "a scale is missing": ("w4a16", f"{Q}.weight_scale", None, ["is missing", "W4A16 of 4 bits in groups of 16"]),
    "packed weights are missing": ("gptq", f"{O}.qweight", None, ["is missing", "GPTQ of 4 bits"]),
    "zeros are missing": ("awq", f"{O}.qzeros", None, ["is missing", "AWQ"]),
    "a global scale is missing": ("nvfp4", f"{Q}.weight_global_scale", None, ["is missing", "NVFP4"]),
    "a scale too many": ("w8a8", f"{Q}.weight_scale_2", lambda _: SOME, ["not part of the model"]),
    "a norm has a scale": ("w8a8", "model.norm.weight_scale", lambda _: SOME, ["model.norm is quantised", "F32"]),
    "a scale is zero": ("gptq", f"{DOWN}.scales", at((1, 5), 0), ["scales", "is 0.0", "damaged"]),
    "a scale is NaN": ("w8a8", f"{Q}.weight_scale", at((3, 0), np.nan), ["weight_scale", "is nan"]),
    "a scale is infinite": ("fp8 blocks", f"{Q}.weight_scale_inv", at((0, 1), np.inf), ["is inf"]),
    "an exponent is none": ("mxfp4", f"{Q}.weight_scale", at((2, 1), 255), ["255", "stands for no number"]),
    "a power of two is none": ("fp8 blocks e8m0", f"{Q}.weight_scale_inv", byte_at((0, 0), 255), ["no number"]),
    "a value is none": ("float-quantized", f"{Q}.weight", byte_at((5, 6), 127), ["1 of its values", "no numbers"]),
    "a group does not exist": ("gptq", f"{Q}.g_idx", at(4, 9), ["g_idx names groups 0 to 9, but there are 4"]),
    "a group is negative": ("gptq", f"{Q}.g_idx", at(4, -1), ["g_idx names groups -1 to 3"]),
    "groups are unequal": ("gptq", f"{Q}.g_idx", at(0, 1), ["unequal sizes"]),
    "words are missing": ("gptq", f"{Q}.qweight", lambda x: x[:-1].copy(), ["(7, 64)", "(8, 64)"]),
    "words are packed otherwise": ("awq", f"{Q}.qweight", lambda x: x.T.copy(), ["(8, 64)", "(64, 8)"]),
    "scales of other groups": ("w4a16", f"{Q}.weight_scale", lambda x: x[:, :2].copy(), ["(64, 2)", "(64, 4)"]),
    "another type": ("w8a8", f"{Q}.weight", lambda x: x.astype(np.int32), ["type I32", "I8"]),
    "symmetric with zeros": ("gptq symmetric", f"{Q}.qzeros", at((1, 2), 0), ["symmetric", "qzeros hold"]),
    "of another shape": ("w4a16", f"{Q}.weight_shape", lambda x: x[::-1] + 1, ["weight_shape is (65, 65)"]),
    "the head was quantised": ("w8a8", "lm_head.weight", lambda x: x.astype(np.int8), ["lm_head is quantised", "I8"]),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_one_error_that_names_file_and_tensor(what, tmp_path):
    kind, name, change, words = DAMAGE[what]
    write_quantised(tmp_path, kind)
    tensors = read(tmp_path / "model.safetensors")
    old = tensors.pop(name, None)
    if change is not None:
        tensors[name] = change(old)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        PagedModel(tmp_path)
    module = name.rpartition(".")[0]
    assert all(word in str(error.value) for word in (str(tmp_path), module, *words)), error.value
    assert len(str(error.value)) < 600


def described(folder, **changes):
    path = folder / "config.json"
    hf = json.loads(path.read_text())
    path.write_text(json.dumps({**hf, "quantization_config": {**hf["quantization_config"], **changes}}))
    return folder


def test_lists_and_files_must_agree(tmp_path):
    """Whichever of them says that a weight was quantised."""
    ignore = ["lm_head", Q]
    write_quantised(tmp_path / "a", "w8a8")
    with pytest.raises(CheckpointError, match=f"does not say that {Q} is quantised, but .* holds {Q}.weight_scale of"):
        PagedModel(described(tmp_path / "a", ignore=ignore))
    write_quantised(tmp_path / "b", "w4a16")
    with pytest.raises(CheckpointError, match=f"does not say that {Q} is quantised, but .* holds {Q}.weight_"):
        PagedModel(described(tmp_path / "b", ignore=ignore))
    gone = {f"{Q}.{end}": None for end in ("weight_packed", "weight_scale", "weight_shape")}
    write_quantised(tmp_path / "c", "w4a16", **gone, **{f"{Q}.weight": SOME})
    with pytest.raises(CheckpointError, match=f"that {Q} is stored in W4A16 .*, but .* of type F32. Down"):
        PagedModel(tmp_path / "c")
    PagedModel(described(tmp_path / "c", ignore=["lm_head", "re:.*layers.0.self_attn.q_proj"]))


def test_files_say_which_weights_were_quantised_where_config_json_does_not(tmp_path):
    gone = {f"{Q}.{end}": None for end in ("qweight", "scales", "qzeros", "g_idx")}
    write_quantised(tmp_path, "gptq", **gone, **{f"{Q}.weight": SOME})
    params = PagedModel(tmp_path).params
    np.testing.assert_array_equal(params.layers[0].self_attn.q_proj.weight, SOME.reshape(4, 16, 64))


def test_symmetric_zeros_of_the_other_version_are_known_by_their_values(tmp_path):
    zeros = np.full((2, 8), 0x88888888, np.uint32).view(np.int32)
    write_quantised(tmp_path, "gptq symmetric", **{f"{Q}.qzeros": zeros})
    found, expected = (PagedModel(folder).params for folder in (tmp_path, tmp_path / "exact"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_group_that_divides_nothing_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="64 inputs do not divide into groups of 48"):
        PagedModel(described(write_quantised(tmp_path, "gptq"), group_size=48))


def test_an_order_of_inputs_of_which_nothing_is_said_is_refused_where_it_is_no_form(tmp_path):
    folder = described(write_quantised(tmp_path, "gptq shuffled"), desc_act=False)
    PagedModel(folder)
    with pytest.raises(CheckpointError, match="inputs in another order.*--quantized-form rows"):
        PagedModel(folder, form="stored", platform="gpu")


def test_the_option_must_not_contradict_the_checkpoint():
    gptq = quantization_of(FORMATS["gptq"][2])
    assert rounding_of("gptq", gptq) is None and rounding_of("int8", gptq) == "int8" and rounding_of(None, gptq) is None
    assert rounding_of("fp8", None) == "fp8" and rounding_of("fp8", quantization_of(FORMATS["fp8 blocks"][2])) is None
    with pytest.raises(ConfigError, match="quantization is 'awq', but config.json says .* stored in GPTQ. Leave"):
        rounding_of("awq", gptq)
    with pytest.raises(ConfigError, match="'fp8_per_block', but config.json"):
        rounding_of("fp8_per_block", gptq)
    with pytest.raises(ConfigError, match="quantization is 'awq', a format of checkpoints, but .* nothing"):
        rounding_of("awq", None)
