"""A spec that contradicts itself is a mistake in a model's file and shows at once."""

import pytest

from jaxpaged.params.placing import stored_shape
from jaxpaged.params.spec import Spec

SIZES = {"E": 4, "Q": 24, "D": 48, "N": 8, "K": 2, "H": 12, "F": 80}


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (Spec("NHD", "NH D", "q"), (96, 48)),
        (Spec("DNH", "D NH", "o"), (48, 96)),
        (Spec("KH", "KH", "bias"), (24,)),
        (Spec("eQD", "E Q D", "experts.{}.up"), (24, 48)),
        (Spec("D", "1 D", "gate"), (1, 48)),
        (Spec("KHD", "KH D", "qkv", fused=("NH", "KH", "KH"), part=2), (144, 48)),
        (Spec("EQD", "E Q D", "gate_up", fused=("Q", "Q"), part=1, fused_axis=1), (4, 48, 48)),
        (Spec("EDQ", "E D Q", "down", transposed=True), (4, 24, 48)),
    ],
)
def test_the_shape_in_the_checkpoint_follows_from_the_letters(spec, shape):
    assert stored_shape(spec, SIZES) == shape


@pytest.mark.parametrize(
    "arguments",
    [("ND", "NH D", "q"), ("!D", "! D", "q"), ("ED", "e D", "router"), ("NHD", "NH D", "qkv", ("NH", "KH"), 1)],
)
def test_letters_that_contradict_each_other_are_refused(arguments):
    with pytest.raises(AssertionError):
        Spec(*arguments)
