"""What an adapter's folder becomes, in every layout and under every name; and what is refused, saying why."""

import hashlib
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.errors import CheckpointError
from jaxpaged.params.hub import EMBEDDED_ADAPTER, EMBEDDED_FOLDER, resolve_adapter_folder
from tests.models.adapted import GOLDEN, read, write_base

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LAYER = "base_model.model.model.layers.1"


def parts_of(name):
    """(config, tensors) of a golden."""
    return json.loads((GOLDEN / name / CONFIG).read_text()), load_file(GOLDEN / name / WEIGHTS)


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of the goldens' checkpoints, by the name of the golden."""
    checkpoint = lambda name: json.loads((GOLDEN / name / "logits.json").read_text())["checkpoint"]
    names = [path.name for path in GOLDEN.iterdir()]
    return {name: write_base(checkpoint(name), tmp_path_factory.mktemp(name)) for name in names}


def assert_same(adapter, other):
    assert adapter.weights.keys() == other.weights.keys()
    for path, weights in adapter.weights.items():
        for array, expected in zip(weights.__dict__.values(), other.weights[path].__dict__.values(), strict=True):
            np.testing.assert_array_equal(array, expected)


def test_axes_are_the_parameters_own_and_the_scaling_is_in_b(bases):
    _, tensors = parts_of("plain")
    adapter = read(GOLDEN / "plain", bases["plain"])
    o_proj, scaling = adapter.weights[".layers[1].self_attn.o_proj"], np.float32(6 / 4)
    assert o_proj.a.shape == (4, 8, 12) and o_proj.b.shape == (48, 4) and o_proj.magnitude is None
    np.testing.assert_array_equal(o_proj.a.reshape(4, 96), tensors[f"{LAYER}.self_attn.o_proj.lora_A.weight"])
    np.testing.assert_array_equal(o_proj.b, tensors[f"{LAYER}.self_attn.o_proj.lora_B.weight"] * scaling)
    files = [(GOLDEN / "plain" / name).read_bytes() for name in (CONFIG, WEIGHTS)]
    assert adapter.digest == hashlib.sha256(b"".join(files)).hexdigest()
    assert (adapter.rank, adapter.num_tensors) == (4, 16)
    assert adapter.num_bytes == sum(each.size * 4 for each in tensors.values())


def test_a_table_is_read_as_a_matrix_and_a_classifier_is_replaced(bases):
    _, tensors = parts_of("tables")
    table = read(GOLDEN / "tables", bases["tables"]).weights[".embed_tokens"]
    name = "base_model.model.model.embed_tokens.lora_embedding_"
    np.testing.assert_array_equal(table.a, tensors[f"{name}B"].T)
    np.testing.assert_array_equal(table.b, tensors[f"{name}A"].T * np.float32(1.5))
    specs_path = read_classifier(bases)
    np.testing.assert_array_equal(
        specs_path.replaced[".score"], parts_of("classifier")[1]["base_model.model.score.weight"]
    )


def read_classifier(bases):
    from jaxpaged.models.pooling import pooling_model
    from jaxpaged.models.registry import model_for
    from jaxpaged.params.adapters.reading import read_adapter

    hf = json.loads((bases["classifier"] / "config.json").read_text())
    config = model_for(hf).config_from_hf(hf)
    specs = pooling_model(model_for(hf), "classify").param_specs(config, 1)
    return read_adapter(GOLDEN / "classifier", specs, config, dtype=np.float32)


def of_each_expert(tensors, num_experts, gate_and_up_apart=True):
    """The tensors of parameters with all experts, as a module for each: PEFT's layout before models were fused."""
    found = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            found[name] = tensor
            continue
        block, is_gate_up, is_a = name.partition(".experts")[0], ".base_layer." in name, "lora_A" in name
        for e in range(num_experts):
            if is_a:
                one = tensor.reshape(num_experts, -1, tensor.shape[1])[e]
            else:
                one = tensor.reshape(tensor.shape[0], -1, num_experts)[:, :, e]
            parts = {"down_proj": one}
            if is_gate_up and is_a:
                parts = {"gate_proj": one, "up_proj": one}
            elif is_gate_up:
                parts = dict(zip(("gate_proj", "up_proj"), np.split(one, 2), strict=True))
            for projection, part in parts.items():
                end = "lora_A" if is_a else "lora_B"
                found[f"{block}.experts.{e}.{projection}.{end}.weight"] = np.ascontiguousarray(part)
    return found


def test_experts_with_a_module_each_are_those_of_one_parameter_and_both_go_together(bases, tmp_path):
    config, tensors = parts_of("all_linear")
    expected = read(GOLDEN / "all_linear", bases["all_linear"])
    twice = {"rank_pattern": {"gate_proj|up_proj": 8}, "alpha_pattern": {"gate_proj|up_proj": 12}}
    apart = of_each_expert(tensors, 16)
    alone = read(write(tmp_path / "a", {**config, **twice}, apart), bases["all_linear"])
    assert_same(alone, expected)
    both = {name: tensor for name, tensor in tensors.items() if ".experts.lora" not in name}
    both |= {name: tensor for name, tensor in apart.items() if "down_proj" in name}
    inner = {name.replace(".experts.base_layer.", ".experts."): tensor for name, tensor in both.items()}
    assert_same(read(write(tmp_path / "b", config, inner), bases["all_linear"]), expected)


def test_each_expert_has_magnitudes_of_its_own_and_parameters_with_all_have_none(bases, tmp_path):
    config, tensors = parts_of("all_linear")
    twice = {"rank_pattern": {"gate_proj|up_proj": 8}, "alpha_pattern": {"gate_proj|up_proj": 12}}
    apart = of_each_expert(tensors, 16)
    plain = read(write(tmp_path / "a", {**config, **twice}, apart), bases["all_linear"]).weights
    draw = np.random.default_rng(0)
    names = [name.removesuffix(".lora_B.weight") for name in apart if name.endswith(".lora_B.weight")]
    magnitudes = {name: draw.uniform(0.5, 2, len(apart[f"{name}.lora_B.weight"])).astype(np.float32) for name in names}
    with_own = apart | {f"{name}.lora_magnitude_vector": magnitude for name, magnitude in magnitudes.items()}
    folder = write(tmp_path / "b", {**config, **twice, "use_dora": True}, with_own)
    found = read(folder, bases["all_linear"]).weights
    checkpoint = load_file(bases["all_linear"] / "model.safetensors")
    for projection in ("gate_proj", "down_proj"):
        path = f".layers[1].mlp.{projection}"
        for expert in (0, 5, 15):
            name = f"layers.1.mlp.experts.{expert}.{projection}"
            whole = checkpoint[f"model.{name}.weight"] + plain[path].b[expert] @ plain[path].a[expert]
            rows = whole * found[path].magnitude[expert][:, None]
            np.testing.assert_allclose(
                np.linalg.norm(rows, axis=1), magnitudes[f"base_model.model.model.{name}"], rtol=1e-5
            )
    stacks = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    fused = refusal(write(tmp_path / "c", {**config, "use_dora": True}, stacks), bases["all_linear"])
    assert "one parameter with all experts, and use_dora is true" in fused


def test_peft_before_0_19_took_inputs_of_experts_for_outputs(bases, tmp_path):
    """Told from the shapes, and from its version where both are equal; models that store inputs first are the same."""
    config, tensors = parts_of("all_linear")
    turned = dict(tensors)
    for name in [name for name in tensors if ".experts." in name and "lora_A" in name]:
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        of_each = a.reshape(16, -1, a.shape[1])
        turned[name] = np.ascontiguousarray(b.reshape(b.shape[0], -1, 16).transpose(2, 1, 0).reshape(-1, b.shape[0]))
        turned[name.replace("lora_A", "lora_B")] = np.ascontiguousarray(
            of_each.transpose(2, 1, 0).reshape(a.shape[1], -1)
        )
    assert turned.keys() == tensors.keys()
    config["peft_version"] = "0.18.1"
    expected = read(GOLDEN / "all_linear", bases["all_linear"])
    found = read(write(tmp_path / "a", config, turned), bases["all_linear"])
    for path, weights in found.weights.items():  # the scaling is in the other factor now
        other = expected.weights[path]
        is_experts = ".mlp." in path and "proj" in path
        change = np.matmul if is_experts else lambda b, a: np.tensordot(b, a, 1)
        np.testing.assert_allclose(change(weights.b, weights.a), change(other.b, other.a), atol=1e-5)


@pytest.mark.parametrize(
    "renamed",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: f"base_model.model.{name}",
        lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
        lambda name: name.replace("base_model.model.model.", "base_model.model."),
        lambda name: name.replace("base_model.model.model.", "base_model.model.model.language_model."),
        lambda name: name.replace("base_model.model.", "base_model.model.language_model."),
        lambda name: name.replace("base_model.model.model.", "base_model.model.model.model."),
        lambda name: name.replace(".weight", ".default.weight"),
    ],
)
def test_other_beginnings_of_names_are_the_same_modules(renamed, bases, tmp_path):
    config, tensors = parts_of("plain")
    renamed = {renamed(name): tensor for name, tensor in tensors.items()}
    assert_same(read(write(tmp_path / "a", config, renamed), bases["plain"]), read(GOLDEN / "plain", bases["plain"]))


def test_the_embedded_adapter_changes_all_layers_of_the_embedded_model():
    folder = resolve_adapter_folder(EMBEDDED_ADAPTER)
    adapter = read(folder, EMBEDDED_FOLDER)
    assert (adapter.rank, len(adapter.weights), adapter.num_tensors) == (4, 6 * 7, 6 * 7 * 2)
    assert (folder / WEIGHTS).stat().st_size < 300_000


# ---- refusals --------------------------------------------------------------------------------------


def refusal(folder, base, **options):
    with pytest.raises(CheckpointError) as error:
        read(folder, base, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"peft_type": None}, "no peft_type"),
        ({"alora_invocation_tokens": [1, 2]}, "activated LoRA"),
        ({"lora_bias": True}, "biases beside lora_B"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"layer_replication": [[0, 2]]}, "layers several times"),
        ({"use_qalora": True}, "QALoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "BD-LoRA"),
        ({"trainable_token_indices": [3]}, "embeddings of some tokens"),
        ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "changed the base's weights"),
        ({"init_lora_weights": "corda"}, "changed the base's weights"),
        ({"init_lora_weights": "loftq"}, "LoftQ"),
        ({"init_lora_weights": "new"}, "nothing is known"),
        ({"use_dora": True}, "no lora_magnitude_vector"),
        ({"r": 8}, "of rank 4, but adapter_config.json makes it 8"),
        ({"r": "4"}, "r is '4'; it must be a positive whole number"),
        ({"lora_alpha": None, "r": None}, "r is None"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern"),
        ({"target_modules": "("}, "target_modules"),
        ({"target_modules": 3}, "target_modules is 3"),
        ({"modules_to_save": ["norm"]}, "modules_to_save in adapter_config.json names norm"),
        ({"use_newlora": {"x": 1}}, "use_newlora is {'x': 1}. Nothing is known"),
    ],
)
def test_a_configuration_that_means_something_else_is_refused_by_name(changed, words, bases, tmp_path):
    config, tensors = parts_of("plain")
    assert words in refusal(write(tmp_path / "a", {**config, **changed}, tensors), bases["plain"])


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "eva", "mica", None])
def test_ways_to_begin_that_left_the_base_alone_are_taken(start, bases, tmp_path):
    config, tensors = parts_of("plain")
    found = read(write(tmp_path / "a", {**config, "init_lora_weights": start}, tensors), bases["plain"])
    assert_same(found, read(GOLDEN / "plain", bases["plain"]))


Q_PROJ = f"{LAYER}.self_attn.q_proj"


def without(tensors, name):
    return {each: tensor for each, tensor in tensors.items() if each != name}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: without(t, f"{Q_PROJ}.lora_A.weight"), "has lora_B but no lora_A"),
        (lambda t: without(t, f"{Q_PROJ}.lora_B.weight"), "has lora_A but no lora_B"),
        (lambda t: t | {f"{Q_PROJ}.lora_B.bias": t[f"{Q_PROJ}.lora_B.weight"]}, "lora_B.bias is no part of a LoRA"),
        (
            lambda t: t | {f"{Q_PROJ}.lora_A.weight": np.zeros((4, 40), "f")},
            "has shape (4, 40), but this model makes it",
        ),
        (lambda t: t | {f"{Q_PROJ}.lora_B.weight": np.zeros((96, 5), "f")}, "makes it (96, 4)"),
        (lambda t: t | {f"{Q_PROJ}.lora_A.weight": np.zeros(4, "f")}, "both must have two axes"),
        (lambda t: t | {f"{Q_PROJ}.lora_A.default.weight": np.zeros((4, 48), "f")}, "two tensors"),
        (lambda t: t | {f"{Q_PROJ}.lora_magnitude_vector": np.ones(96, "f")}, "but use_dora is false"),
        (lambda t: t | {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": np.ones((4, 48), "f")}, "1 of 17"),
        (lambda t: t | {"base_model.model.model.norm.lora_A.weight": np.ones((4, 48), "f")}, "no adapter can change"),
        (lambda t: t | {"base_model.model.model.norm.weight": np.ones(48, "f")}, "norm.weight is of no module that"),
        (lambda t: t | {f"{Q_PROJ}.weight": np.ones((96, 48), "f")}, "q_proj.weight is of no module that"),
        (lambda t: t | {f"{Q_PROJ}.lora_A.weight": np.full((4, 48), np.nan, "f")}, "infinite or none"),
        (lambda t: t | {f"{Q_PROJ}.lora_A.weight": np.ones((4, 48), "i4")}, "has type I32"),
        (lambda t: {n: np.zeros_like(x) if "lora_B" in n else x for n, x in t.items()}, "the adapter does nothing"),
        (lambda t: {}, "holds no tensors"),
        (lambda t: {n.replace("q_proj", "q_prj"): x for n, x in t.items()}, "Did you mean"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(change, words, bases, tmp_path):
    config, tensors = parts_of("plain")
    assert words in refusal(write(tmp_path / "a", config, change(tensors)), bases["plain"])


def test_experts_in_no_known_layout_are_refused(bases, tmp_path):
    config, tensors = parts_of("all_linear")
    name = f"{LAYER}.mlp.experts.lora_A.weight"
    turned = tensors | {name: np.ascontiguousarray(tensors[name].T)}
    assert "PEFT's layout of target_parameters" in refusal(write(tmp_path / "a", config, turned), bases["all_linear"])
    more = tensors | {
        f"{LAYER}.mlp.experts.16.down_proj.{part}": np.ones(shape, "f")
        for part, shape in (("lora_A.weight", (4, 24)), ("lora_B.weight", (48, 4)))
    }
    assert "the model has 16 experts" in refusal(write(tmp_path / "a", config, more), bases["all_linear"])
    twice = tensors | {
        f"{LAYER}.mlp.experts.3.down_proj.{part}": np.ones(shape, "f")
        for part, shape in (("lora_A.weight", (4, 24)), ("lora_B.weight", (48, 4)))
    }
    assert "adapted twice" in refusal(write(tmp_path / "a", config, twice), bases["all_linear"])


def test_a_larger_rank_than_is_taken_says_which_is_needed(bases):
    words = refusal(GOLDEN / "rslora_patterns", bases["rslora_patterns"], max_rank=1)
    assert "rank 7" in words and "--max-lora-rank 8" in words
    assert read(GOLDEN / "rslora_patterns", bases["rslora_patterns"], max_rank=8).rank == 7


def test_grown_and_changed_tables_are_refused(bases, tmp_path):
    config, tensors = parts_of("tables")
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    grown = tensors | {name: np.ones((213, 48), "f")}
    assert "vocabulary that was changed" in refusal(write(tmp_path / "a", config, grown), bases["tables"])
    other = tensors | {name: tensors[name] + np.float32(0.5)}
    assert "differs from the base's own" in refusal(write(tmp_path / "a", config, other), bases["tables"])
    name = "base_model.model.model.embed_tokens.lora_embedding_A"
    grown = tensors | {name: np.ones((4, 213), "f")}
    assert "vocabulary that was changed" in refusal(write(tmp_path / "a", config, grown), bases["tables"])


def test_a_whole_module_beside_others_is_a_classifier_only(bases, tmp_path):
    config, tensors = parts_of("plain")
    config["modules_to_save"] = ["lm_head"]
    whole = tensors | {"base_model.model.lm_head.weight": np.ones((211, 48), "f")}
    folder = write(tmp_path / "a", config, whole)
    assert "only classifiers may have" in refusal(folder, bases["plain"])
    assert read(folder, bases["plain"], may_replace=True).replaced[".lm_head"].shape == (211, 48)


def test_magnitudes_need_the_bases_weights(bases):
    assert "DoRA" in refusal(GOLDEN / "dora", bases["dora"], base_weight=None)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("size", [0, 5, 100, -7])
def test_truncated_files_are_an_error_naming_the_file(name, size, bases, tmp_path):
    folder = write(tmp_path / "a", *parts_of("plain"))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:size])
    assert name in refusal(folder, bases["plain"])


def test_folders_of_something_else_say_what_they_are(bases, tmp_path):
    assert "there is no folder" in refusal(tmp_path / "nowhere", bases["plain"])
    assert "It holds a whole model" in refusal(bases["plain"], bases["plain"])
    folder = write(tmp_path / "a", *parts_of("plain"))
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert "torch.load('adapter_model.bin'" in refusal(folder, bases["plain"])
    (folder / "adapter_model.bin").unlink()
    assert f"no {WEIGHTS}" in refusal(folder, bases["plain"])


def test_numbers_that_a_type_cannot_hold_are_an_error(bases, tmp_path):
    from jaxpaged.params.adapters.reading import read_adapter
    from tests.models.adapted import specs_of

    config, tensors = parts_of("plain")
    large = tensors | {f"{Q_PROJ}.lora_A.weight": np.full((4, 48), 1e5, "f")}
    with pytest.raises(CheckpointError, match="cannot hold"):
        read_adapter(write(tmp_path / "a", config, large), *specs_of(bases["plain"]), dtype=np.float16)
