"""What happens to queries and keys between the products that make them and attention: they are normalised and rotated.

Letters: P pairs of numbers of a head that are rotated together.
"""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadNorm:
    """Each head over its root mean square, rounded, times a weight. `eps` is added to the mean square."""

    q_weight_H: jax.Array
    k_weight_H: jax.Array
    eps: float = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation:
    """The angles of tokens, float32. Numbers i and i + P of a head make a pair, or, `is_interleaved`, 2 i and 2 i + 1;
    what lies behind the pairs stays as it is. `norm`: what heads go through before, if anything."""

    cos_TP: jax.Array
    sin_TP: jax.Array
    is_interleaved: bool = dataclasses.field(default=False, metadata={"static": True})
    norm: HeadNorm | None = None
