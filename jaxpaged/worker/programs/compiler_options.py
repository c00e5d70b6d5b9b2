"""Options of XLA that differ from its defaults, by kind of device and kind of program: the only place that has any.

They are part of what is compiled: of the key of jax's compilation cache, and of a bundle's fingerprint. What they gain
on a TPU was counted by its compiler, not timed. What the variable XLA_FLAGS says of an option goes before what is here.
"""

import logging
import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

logger = logging.getLogger(__name__)

Options = Mapping[str, bool | int]
"""Name -> value, as `jax.jit` takes them."""

LAYER_KINDS = ("forward", "decode", "decode_full", "draft")
"""Programs with the model's layers in them."""

LAYER_OPTIONS: Mapping[str, Options] = {
    # XLA makes one fusion of a feed-forward's products up and down, which reads weights slower than two fusions do. Two
    # layers and all that is around them, 256 rows on a v6e: 1.74 million estimated cycles for an 8B model, and 1.47 so;
    # 0.56 and 0.50 for a 1B model. Not on a v5e, which fuses little, and is no faster without (1B, 32 rows: 0.499 and
    # 0.508), nor on a TPU7x, which never fuses these.
    "TPU v6 lite": {"xla_tpu_dot_dot_fusion": False},
    # LLVM's third level, XLA's default, takes twice the CPU time of its second for the programs of a 110M Llama of 12
    # layers (7.2 s and 3.9 for 64 tokens, 8.6 and 6.2 for a run of decodes), and as much for those of the embedded
    # model. Steps are as fast or faster: 0.97 of the time for a prompt of 1,024, 0.91 to 0.97 for decodes of 1 to 32
    # rows (medians of 7, two engines in one process in turns). The first level saves nothing more.
    "cpu": {"xla_backend_optimization_level": 2},
}
"""Kind of device -> options of `LAYER_KINDS`."""


def compiler_options(mesh: Mesh | AbstractMesh) -> dict[str, Options]:
    """Kind of program -> its options on the devices of `mesh`; kinds that are not there take XLA's defaults.

    An option that the installed compiler does not know is left out, with a warning: it may be older or newer.
    """
    if isinstance(mesh, AbstractMesh):
        return {}  # there is no compiler for it here
    said = os.environ.get("XLA_FLAGS", "")
    options = LAYER_OPTIONS.get(mesh.devices.flat[0].device_kind, {})
    options = {name: value for name, value in options.items() if f"--{name}=" not in said}
    known = {name: value for name, value in options.items() if is_known(mesh, name, value)}
    return dict.fromkeys(LAYER_KINDS, known) if known else {}


def is_known(mesh: Mesh, name: str, value: bool | int) -> bool:
    """Whether the compiler for these devices takes an option: it is asked for a program that does nothing."""
    whole = NamedSharding(mesh, PartitionSpec())
    nothing = jax.jit(lambda: jnp.int32(0), out_shardings=whole, compiler_options={name: value})
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            nothing.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        logger.warning("programs are compiled without %s, which this compiler does not take: %s", name, error)
        return False
    return True
