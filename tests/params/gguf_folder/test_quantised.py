"""Quantised matrices of a GGUF file become parameters that hold what ggml makes of them, whatever lies in the file
turned or stacked, on one device and on several."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.params.formats.gguf.blocks import DECODERS
from jaxpaged.params.forms import Device, form_of
from jaxpaged.params.gguf_folder.folder import make_folder
from jaxpaged.params.schemes.gguf import Gguf
from jaxpaged.params.spec import Spec
from tests.models.checkpoints import CONFIGS, fp4_groups, make_tensors, random_tensors, write_packed_checkpoint
from tests.models.quantised_checkpoints import write
from tests.models.tensor_shapes import tensor_shapes
from tests.params.formats.gguf.writer import write_gguf
from tests.params.gguf_folder.gguf_checkpoints import config_of, facts_of, tensors_of, turned
from tests.params.test_orbax_format import load

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = {**CONFIGS["mixtral"], **SIZES, **HEADS, "tie_word_embeddings": False}
GOLDEN = dict(np.load(Path(__file__).parents[2] / "golden" / "formats" / "gguf_weights.npz"))


def in_blocks(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, weights) of a matrix of rows that ggml packed, drawn at random."""
    inputs = shape[-1]
    rows, weights = GOLDEN[f"{name}/rows"], GOLDEN[f"{name}/weight"]
    rows, weights = rows.reshape(-1, rows.shape[1] * inputs // 512), weights.reshape(-1, inputs)
    drawn = rng.integers(0, len(rows), shape[:-1])
    return rows[drawn], weights[drawn]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(folder of a GGUF file with matrices of all types, checkpoint with what they mean)."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("quantised")
    plain = random_tensors(tensor_shapes(CONFIG), CONFIG, 0)
    in_file, meant = tensors_of(CONFIG, plain), {}
    kinds = 3 * list(DECODERS)
    for name, tensor in in_file.items():
        if tensor.ndim > 1 and "ffn_gate_inp" not in name:
            kind = kinds.pop()
            rows, meant[name] = in_blocks(kind, tensor.shape, rng)
            in_file[name] = (kind, rows)
    path = write_gguf(folder / "model.gguf", facts_of(CONFIG), in_file)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    write(checkpoint, {**plain, **dequantised(meant)}, CONFIG)
    return make_folder(path, folder / "cache"), checkpoint


def dequantised(meant: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Matrices under the names of a checkpoint, with rows in its order."""
    found = {"model.embed_tokens.weight": meant.pop("token_embd.weight"), "lm_head.weight": meant.pop("output.weight")}
    projections = {"gate": "w1", "up": "w3", "down": "w2"}
    for name, weight in meant.items():
        _, layer, own, _ = name.split(".")
        start = f"model.layers.{layer}"
        if own.endswith("_exps"):
            projection = projections[own.split("_")[1]]
            found |= {f"{start}.block_sparse_moe.experts.{i}.{projection}.weight": one for i, one in enumerate(weight)}
        else:
            heads = {"attn_q": 4, "attn_k": 2}.get(own)
            straight = weight if heads is None else unturned(weight, heads)
            found[f"{start}.self_attn.{own[5]}_proj.weight"] = straight
    return found


def unturned(rows: np.ndarray, heads: int) -> np.ndarray:
    """What `turned` makes `rows` of."""
    places = turned(np.arange(len(rows)), heads)
    found = np.empty_like(rows)
    found[places] = rows
    return found


@pytest.mark.parametrize("num_devices", [1, 2])
def test_parameters_are_what_ggml_makes_of_the_file(folders, num_devices):
    found, expected = (load(folder, num_devices, "bfloat16")[2] for folder in folders)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(("kind", "form"), [("F16", None), ("BF16", None), ("F32", None), ("Q8_0", "int8")])
def test_weights_that_nobody_quantised_stay_so_though_their_rows_lie_in_another_order(platform, kind, form):
    spec = Spec("NHD", "NH D", "model.layers.0.self_attn.q_proj.weight", scheme=Gguf(kind, 4))
    device = Device(platform, lambda *_: None, {})
    sizes = {"N": 4, "H": 64, "D": 256}
    assert form_of(spec, spec.scheme.numbers, "auto", sizes, device) == form


def test_damaged_blocks_are_refused_with_the_tensor(folders, tmp_path):
    rows, _ = in_blocks("Q4_K", (CONFIG["vocab_size"], 256), np.random.default_rng(0))
    rows[7, :2] = np.array([np.inf], np.float16).view(np.uint8)
    in_file = tensors_of(CONFIG, random_tensors(tensor_shapes(CONFIG), CONFIG, 0))
    path = write_gguf(tmp_path / "a.gguf", facts_of(CONFIG), {**in_file, "token_embd.weight": ("Q4_K", rows)})
    with pytest.raises(
        CheckpointError, match="embed_tokens.weight belongs to a weight in GGUF's Q4_K, and the scale of"
    ):
        load(make_folder(path, tmp_path / "cache"))


def test_types_that_are_not_read_are_refused_before_anything_is_loaded(tmp_path):
    in_file = tensors_of(CONFIG, random_tensors(tensor_shapes(CONFIG), CONFIG, 0))
    rows = np.zeros((CONFIG["vocab_size"], 66), np.uint8)
    path = write_gguf(tmp_path / "a.gguf", facts_of(CONFIG), {**in_file, "token_embd.weight": ("IQ2_XXS", rows)})
    with pytest.raises(
        CheckpointError, match="token_embd.weight has the type IQ2_XXS, which is not read; F32.*another"
    ):
        make_folder(path, tmp_path / "cache")


def test_a_tensor_that_no_such_model_has_is_refused(tmp_path):
    in_file = tensors_of(CONFIG, random_tensors(tensor_shapes(CONFIG), CONFIG, 0))
    extra = {"blk.0.attn_surprise.weight": np.zeros((4, 4), np.float32)}
    path = write_gguf(tmp_path / "a.gguf", facts_of(CONFIG), {**in_file, **extra})
    with pytest.raises(CheckpointError, match="holds blk.0.attn_surprise.weight, which is no part of"):
        make_folder(path, tmp_path / "cache")


@pytest.mark.parametrize("num_devices", [1, 2])
def test_keys_of_latents_are_turned_back_from_their_blocks(num_devices, tmp_path):
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    hf = {**CONFIGS["deepseek_v3"], **sizes, "num_hidden_layers": 1, "rope_scaling": None, "n_group": 1}
    hf |= {"topk_group": 1}
    rng, plain = np.random.default_rng(0), random_tensors(tensor_shapes(hf), hf, 0)
    in_file, meant = tensors_of(hf, plain), []
    for part, kind in (("k", "Q8_0"), ("v", "Q4_0")):
        name = f"blk.0.attn_{part}_b.weight"
        rows, weight = in_blocks(kind, in_file[name].shape, rng)
        in_file[name] = (kind, rows)
        meant.append(weight.swapaxes(1, 2) if part == "k" else weight)
    plain["model.layers.0.self_attn.kv_b_proj.weight"] = np.concatenate(meant, axis=1).reshape(-1, 64)
    (tmp_path / "checkpoint").mkdir()
    write(tmp_path / "checkpoint", plain, hf)
    folder = make_folder(write_gguf(tmp_path / "a.gguf", facts_of(hf), in_file), tmp_path / "cache")
    found, expected = (load(each, num_devices, "bfloat16")[2] for each in (folder, tmp_path / "checkpoint"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_experts_of_gpt_oss_are_those_that_were_published(tmp_path):
    hf, plain = config_of("gpt_oss"), make_tensors("gpt_oss")
    in_file = tensors_of(hf, plain)
    for name, tensor in plain.items():
        if name.endswith(("gate_up_proj", "experts.down_proj")):
            codes, exponents = fp4_groups(tensor)
            packed = codes[..., :16] | codes[..., 16:] << 4
            blocks = np.concatenate([(exponents + 127)[..., None], packed], axis=-1).astype(np.uint8)
            rows, layer = blocks.reshape(*blocks.shape[:2], -1), f"blk.{name.split('.')[2]}"
            parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if "gate_up" in name else {"down": rows}
            in_file |= {f"{layer}.ffn_{part}_exps.weight": ("MXFP4", own) for part, own in parts.items()}
    folder = make_folder(write_gguf(tmp_path / "a.gguf", facts_of(hf), in_file), tmp_path / "cache")
    (tmp_path / "published").mkdir()
    published = write_packed_checkpoint("gpt_oss", tmp_path / "published")
    found, expected = (load(each, 1, "bfloat16")[2] for each in (folder, published))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
