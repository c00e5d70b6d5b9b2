"""What becomes of the numbers of a prompt, and what a model's folder says of it."""

import json

import numpy as np
import pytest

from jaxpaged.config import ModelConfig
from jaxpaged.engine.pooling.pooler import Pooler, gives_types, load_pooler, load_pooler_defaults, load_text_length
from jaxpaged.errors import CheckpointError, RequestError
from jaxpaged.pooling import PoolingParams

VECTOR = np.array([3.0, -4.0, 12.0], np.float32)


def finish(pooler, **params):
    return pooler.finish(VECTOR, PoolingParams(**params))


def test_an_embedding_is_cut_before_it_is_normalised():
    pooler = Pooler("embed", 3, "normalize", dimensions=())
    np.testing.assert_allclose(finish(pooler), VECTOR / 13, rtol=1e-6)
    np.testing.assert_allclose(finish(pooler, dimensions=2), [0.6, -0.8], rtol=1e-6)
    np.testing.assert_array_equal(finish(pooler, use_activation=False), VECTOR)
    np.testing.assert_array_equal(finish(pooler, normalize=False), VECTOR)
    zeros = pooler.finish(np.zeros(3, np.float32), PoolingParams())
    np.testing.assert_array_equal(zeros, np.zeros(3))


def test_the_engines_default_holds_unless_the_request_says_otherwise():
    pooler = Pooler("embed", 3, "normalize", use_activation=False)
    np.testing.assert_array_equal(finish(pooler), VECTOR)
    np.testing.assert_allclose(np.linalg.norm(finish(pooler, use_activation=True)), 1, rtol=1e-6)


def test_scores_become_probabilities():
    powers = np.exp(VECTOR.astype(np.float64))
    np.testing.assert_allclose(finish(Pooler("classify", 3, "softmax")), powers / powers.sum(), rtol=1e-6)
    expected = 1 / (1 + np.exp(-VECTOR.astype(np.float64)))
    np.testing.assert_allclose(finish(Pooler("classify", 3, "sigmoid")), expected, rtol=1e-5)
    large = Pooler("classify", 2, "softmax").finish(np.array([1e4, -1e4], np.float32), PoolingParams())
    np.testing.assert_array_equal(large, [1, 0])
    large = Pooler("classify", 2, "sigmoid").finish(np.array([1e4, -1e4], np.float32), PoolingParams())
    np.testing.assert_array_equal(large, [1, 0])


@pytest.mark.parametrize(
    ("pooler", "params", "message"),
    [
        (Pooler("embed", 3, "normalize"), {"dimensions": 2}, "may not be cut"),
        (Pooler("embed", 3, "normalize", dimensions=()), {"dimensions": 4}, "this model can give 1 to 3"),
        (Pooler("embed", 3, "normalize", dimensions=(1, 3)), {"dimensions": 2}, "this model can give 1, 3"),
        (Pooler("embed", 3, "normalize"), {"dimensions": 0}, "at least 1"),
        (Pooler("embed", 3, "normalize"), {"task": "classify"}, "was started for embed"),
        (Pooler("classify", 3, "softmax"), {"task": "embed"}, "was started for classify and score"),
        (Pooler("classify", 3, "softmax"), {"dimensions": 3}, "may not be cut"),
        (Pooler("embed", 3, "normalize"), {"use_activation": True, "normalize": False}, "mean the same"),
        (Pooler("embed", 3, "normalize"), {"use_activation": 1}, "true or false"),
    ],
)
def test_what_the_engine_does_not_give_is_refused(pooler, params, message):
    with pytest.raises(RequestError, match=message):
        pooler.check(PoolingParams(**params))


def test_the_full_size_may_always_be_asked_for():
    Pooler("embed", 3, "normalize").check(PoolingParams(dimensions=3))


def pooler_for(tmp_path, convert, **fields):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 16, **fields}))
    return load_pooler(ModelConfig(convert=convert, pooler_config={"pooling_type": "LAST"}), tmp_path, {})


def test_an_embedding_model_says_whether_its_vectors_may_be_cut(tmp_path):
    assert pooler_for(tmp_path, "embed") == Pooler("embed", 16, "normalize", True, None)
    assert pooler_for(tmp_path, "embed", is_matryoshka=True).dimensions == ()
    assert pooler_for(tmp_path, "embed", matryoshka_dimensions=[8, 4]).dimensions == (4, 8)
    with pytest.raises(CheckpointError, match="matryoshka_dimensions"):
        pooler_for(tmp_path, "embed", matryoshka_dimensions="all")


def test_a_classifier_names_its_labels_and_says_what_they_are(tmp_path):
    names = {"id2label": {"0": "no", "1": "yes"}}
    assert pooler_for(tmp_path, "classify", **names) == Pooler("classify", 2, "softmax", labels=("no", "yes"))
    assert pooler_for(tmp_path, "classify").labels == ("LABEL_0", "LABEL_1")
    assert pooler_for(tmp_path, "classify", num_labels=1).activation == "sigmoid"
    several = pooler_for(tmp_path, "classify", problem_type="multi_label_classification", **names)
    assert several.activation == "sigmoid"
    assert pooler_for(tmp_path, "classify", problem_type="regression", num_labels=1).activation == "none"


@pytest.mark.parametrize("where", ["sentence_transformers", "sbert_ce_default_activation_function"])
@pytest.mark.parametrize(
    ("name", "meant"),
    [("linear.Identity", "none"), ("activation.Sigmoid", "sigmoid"), ("activation.Softmax", "softmax")],
)
def test_the_activation_that_sentence_transformers_name_is_applied(where, name, meant, tmp_path):
    """Whatever the number of labels and the kind of problem."""
    name = f"torch.nn.modules.{name}"
    given = {where: {"activation_fn": name, "version": "5.1.0"} if where == "sentence_transformers" else name}
    assert pooler_for(tmp_path, "classify", **given, num_labels=1).activation == meant
    problem = "single_label_classification"
    assert pooler_for(tmp_path, "classify", **given, num_labels=3, problem_type=problem).activation == meant
    logits = np.array([10.4], np.float32)
    if meant == "none":
        assert pooler_for(tmp_path, "classify", **given, num_labels=1).finish(logits, PoolingParams()) == logits


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "activation_fn is .*Tanh'"),
        ({"sentence_transformers": {"activation_fn": 7}}, "activation_fn is 7; supported: Identity, Sigmoid, Softmax"),
        ({"sbert_ce_default_activation_function": "my.code.Scale"}, "activation_fn is 'my.code.Scale'"),
        ({"problem_type": "ranking"}, "problem_type is 'ranking'; supported: regression"),
    ],
)
def test_an_activation_that_is_not_known_is_refused(fields, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        pooler_for(tmp_path, "classify", num_labels=1, **fields)


def test_texts_that_would_have_to_be_lowered_are_refused(tmp_path):
    write_modules(tmp_path, ["Transformer", "Pooling"], pooling_mode_mean_tokens=True)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": false}')
    load_pooler_defaults(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": true}')
    with pytest.raises(CheckpointError, match="do_lower_case"):
        load_pooler_defaults(tmp_path)


@pytest.mark.parametrize(
    "normalizer",
    [{"type": "BertNormalizer", "lowercase": True}, {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}],
)
def test_texts_that_the_tokenizer_lowers_are_taken(normalizer, tmp_path):
    write_modules(tmp_path, ["Transformer", "Pooling"], pooling_mode_mean_tokens=True)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": true}')
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": normalizer}))
    assert load_pooler_defaults(tmp_path)["pooling_type"] == "MEAN"
    assert (load_text_length(tmp_path, 512), load_text_length(tmp_path, 32)) == (64, 32)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": {"type": "BertNormalizer", "lowercase": False}}))
    with pytest.raises(CheckpointError, match="the tokenizer does not do so"):
        load_pooler_defaults(tmp_path)


@pytest.mark.parametrize(
    ("config", "gives"),
    [
        ({}, True),
        ({"tokenizer_class": "BertTokenizer"}, True),
        ({"tokenizer_class": "XLMRobertaTokenizerFast"}, False),
        ({"tokenizer_class": "RobertaTokenizer"}, False),
        ({"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]}, False),
        ({"tokenizer_class": "XLMRobertaTokenizer", "model_input_names": ["input_ids", "token_type_ids"]}, True),
    ],
)
def test_a_tokenizer_says_whether_it_tells_the_texts_of_a_pair_apart(config, gives):
    assert gives_types(config) == gives


def write_modules(folder, kinds, **modes):
    types = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(types))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **modes}))


def test_the_files_of_sentence_transformers_say_how_it_is_pooled(tmp_path):
    assert load_pooler_defaults(tmp_path) == {}
    modes = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    write_modules(tmp_path, ["Transformer", "Pooling"], **modes)
    assert load_pooler_defaults(tmp_path) == {"pooling_type": "MEAN", "use_activation": False}


@pytest.mark.parametrize(
    ("kinds", "modes", "message"),
    [
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_mean_tokens": True}, "a module Dense"),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (["Transformer", "Pooling"], {}, r"asks for \[\]"),
    ],
)
def test_ways_of_pooling_that_are_not_known_are_refused(tmp_path, kinds, modes, message):
    write_modules(tmp_path, kinds, **modes)
    with pytest.raises(CheckpointError, match=message):
        load_pooler_defaults(tmp_path)
