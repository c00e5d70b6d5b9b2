"""Operations of a program that XLA compiled here, by the part of jaxpaged that they come from."""

import jax
import jax.numpy as jnp

from jaxpaged.layers.linear import Linear, apply_linear
from jaxpaged.layers.norm import Norm, NormConfig, rms_norm
from jaxpaged.tools.counting.parts import XLA_ITSELF, parts_of


def test_operations_are_told_by_the_file_they_come_from():
    def program(x, w):
        return apply_linear("TD,FD->TF", rms_norm(x, Norm(w[0]), NormConfig(1e-5)), Linear(w)) + jnp.sin(x)

    text = jax.jit(program).lower(jnp.ones((2, 8)), jnp.ones((8, 8))).compile().as_text()
    parts = parts_of(text)
    products = [name for name, part in parts.items() if part == "products"]
    assert any(name.startswith("dot") for name in products)
    assert "norms" in parts.values() and XLA_ITSELF in parts.values()
