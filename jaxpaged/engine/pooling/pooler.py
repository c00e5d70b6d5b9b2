"""From the numbers that the device gives for a prompt to what was asked for: dimensions, length 1, probabilities.

Also what a model's folder says of it: config.json, and the files of sentence-transformers. All in float32 on the host:
it is one vector per request. This module knows neither requests under way nor devices.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.config import ModelConfig
from jaxpaged.engine.input.tokenizer import read_json
from jaxpaged.errors import CheckpointError, RequestError
from jaxpaged.pooling import TASKS, PoolingParams

SENTENCE_TRANSFORMERS_MODES = {
    "pooling_mode_lasttoken": "LAST",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_cls_token": "CLS",
}
TEXTS = "sentence_bert_config.json"
"""The file of sentence-transformers that says what becomes of a text before it is tokenised."""
TYPES, WITHOUT_TYPES = "token_type_ids", ("Roberta", "XLMRoberta")
"""What transformers calls the texts of a pair, and the tokenizers that do not tell them apart."""
KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class Pooler:
    """What a pooling engine gives. `convert` is "embed" or "classify", `width` how many numbers a prompt has.

    `activation` is what `use_activation` means: "normalize", "softmax", "sigmoid" or "none". `dimensions` are the sizes
    to which an embedding may be cut: None for none, empty for any. `type_stride`: by how much the ids of a second text
    are moved up in the engine, where the model is told of which text of a pair a token is; 0: it is not.
    """

    convert: str
    width: int
    activation: str
    use_activation: bool = True
    dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    type_stride: int = 0

    def token_ids(self, prompt_token_ids: list[int]) -> list[int]:
        """Those of a prompt as tokenizers have them."""
        stride = self.type_stride
        return [token_id % stride for token_id in prompt_token_ids] if stride else prompt_token_ids

    def check(self, params: PoolingParams) -> None:
        """Raise RequestError for what this engine does not give."""
        params.verify()
        tasks = TASKS[self.convert]
        if params.task is not None and params.task not in tasks:
            raise RequestError(
                f"task is {params.task!r}, but this model was started for {' and '.join(tasks)}. Ask for that.", "task"
            )
        size = params.dimensions
        if size is None or (size == self.width and self.convert == "embed"):
            return
        if self.dimensions is None:
            raise RequestError(
                f"dimensions is {size}, but the results of this model have {self.width} and may not be cut. "
                "Leave it out.",
                "dimensions",
            )
        if size > self.width or (self.dimensions and size not in self.dimensions):
            allowed = ", ".join(map(str, self.dimensions)) or f"1 to {self.width}"
            raise RequestError(f"dimensions is {size}; this model can give {allowed}.", "dimensions")

    def finish(self, pooled: np.ndarray, params: PoolingParams) -> np.ndarray:
        """The numbers that `params` ask for, float32."""
        values = np.asarray(pooled, np.float32)[: params.dimensions]
        wanted = params.activation_wanted
        if not (self.use_activation if wanted is None else wanted):
            return values
        return ACTIVATIONS[self.activation](values)


def normalized(values: np.ndarray) -> np.ndarray:
    """Of length 1; a vector of zeros stays one."""
    length = np.linalg.norm(values)
    return values / length if length > 0 else values


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max())
    return powers / powers.sum()


def sigmoid(values: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return (0.5 * (1.0 + np.tanh(0.5 * values))).astype(np.float32)


ACTIVATIONS = {"normalize": normalized, "softmax": softmax, "sigmoid": sigmoid, "none": lambda values: values}


# ---- from a model's folder -------------------------------------------------------------------------


def load_pooler(options: ModelConfig, folder: Path, tokenizer_config: Mapping[str, Any]) -> Pooler:
    """The pooler of a model in `folder`. `options` are resolved. Raises CheckpointError."""
    hf = read_json(folder / "config.json")
    hf = {**hf, **(hf.get("text_config") or {})}
    use_activation = options.pooler_config.get("use_activation", True)
    if options.convert == "embed":
        return Pooler("embed", hf["hidden_size"], "normalize", use_activation, matryoshka_sizes(hf))
    labels = label_names(hf)
    activation = classifier_activation(hf, len(labels))
    stride = hf["vocab_size"] if gives_types(tokenizer_config) and hf.get("type_vocab_size", 1) > 1 else 0
    return Pooler("classify", len(labels), activation, use_activation, labels=labels, type_stride=stride)


def gives_types(tokenizer_config: Mapping[str, Any]) -> bool:
    """Whether a tokenizer says of which text of a pair a token is, as transformers reads its tokenizer_config.json."""
    names = tokenizer_config.get("model_input_names")
    if isinstance(names, list):
        return TYPES in names
    return not str(tokenizer_config.get("tokenizer_class")).startswith(WITHOUT_TYPES)


def matryoshka_sizes(hf: Mapping[str, Any]) -> tuple[int, ...] | None:
    """To which sizes embeddings may be cut, as config.json says: None for none, empty for any."""
    sizes = hf.get("matryoshka_dimensions")
    if sizes is not None:
        if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
            raise CheckpointError(f"config.json: matryoshka_dimensions is {sizes!r}; it must be a list of sizes.")
        return tuple(sorted(sizes))
    return () if hf.get("is_matryoshka") else None


def label_names(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels of a classifier by index; without names in config.json they are LABEL_0, LABEL_1, ..."""
    names = hf.get("id2label")
    names = names if isinstance(names, Mapping) else {}
    count = len(names) or hf.get("num_labels", 2)
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))


PROBLEM_TYPES = {
    "regression": "none",
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
}
ACTIVATION_CLASSES = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""What torch calls activations."""


def classifier_activation(hf: Mapping[str, Any], num_labels: int) -> str:
    """What sentence-transformers say, or `problem_type`; or else one label is a yes or no, and of several one is right.

    Raises CheckpointError for an activation or a kind of problem that is not known.
    """
    record = hf.get("sentence_transformers") or {}
    given = record.get("activation_fn") if isinstance(record, Mapping) else record
    given = given or hf.get("sbert_ce_default_activation_function")
    kind = hf.get("problem_type") or (
        "multi_label_classification" if num_labels == 1 else "single_label_classification"
    )
    name = "sentence_transformers.activation_fn" if given else "problem_type"
    value, known = (given, ACTIVATION_CLASSES) if given else (kind, PROBLEM_TYPES)
    activation = known.get(str(value).rpartition(".")[2])
    if activation is None:
        raise CheckpointError(f"config.json: {name} is {value!r}; supported: {', '.join(known)}.")
    return activation


def load_pooler_defaults(folder: Path) -> dict[str, Any]:
    """Pooling options in the files of sentence-transformers; empty without them.

    Raises CheckpointError for a step after the model that is not known, and for ways of pooling that are not.
    """
    path = folder / "modules.json"
    if not path.exists():
        return {}
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        modules = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in listed]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is not a list of modules: {error!r}. Fetch the file again.") from error
    for kind, _ in modules:
        if kind not in KNOWN_MODULES:
            raise CheckpointError(
                f"{path} has a module {kind}; supported are {', '.join(KNOWN_MODULES)}. Use another model."
            )
    if read_json(folder / TEXTS).get("do_lower_case") and not writes_small(read_json(folder / "tokenizer.json")):
        raise CheckpointError(
            f"{folder / TEXTS} has do_lower_case, and the tokenizer does not do so: texts would have to be written in "
            "small letters first, which is not done. Use another model."
        )
    kinds = dict(modules)
    if "Pooling" not in kinds:
        return {}
    mode = pooling_mode(folder / Path(kinds["Pooling"]).name / "config.json")  # a folder beside it, and no other
    return {"pooling_type": mode, "use_activation": "Normalize" in kinds}


def writes_small(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json makes small letters of capitals."""
    normalizer = tokenizer.get("normalizer") or {}
    steps = normalizer.get("normalizers") or [normalizer]
    return any(step.get("type") == "Lowercase" or step.get("lowercase") for step in steps)


def load_text_length(folder: Path, most: int) -> int | None:
    """How many tokens of a text sentence-transformers reads, at most `most`; None where nothing says so."""
    length = read_json(folder / TEXTS).get("max_seq_length")
    return min(length, most) if type(length) is int and length > 0 else None


def pooling_mode(path: Path) -> str:
    """The pooling type in a file of sentence-transformers. Raises CheckpointError unless there is exactly one."""
    modes = [name for name, value in read_json(path).items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in SENTENCE_TRANSFORMERS_MODES:
        raise CheckpointError(f"{path} asks for {modes}; one of {', '.join(SENTENCE_TRANSFORMERS_MODES)} is supported.")
    return SENTENCE_TRANSFORMERS_MODES[modes[0]]
