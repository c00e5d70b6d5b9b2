"""Options of XLA that differ from its defaults, by kind of device and kind of program: the only place that has any.

They are part of what is compiled: of the key of jax's compilation cache, and of a bundle's fingerprint. What they gain
on a TPU was counted by its compiler, not timed; on a GPU and a CPU it was timed. What the variable XLA_FLAGS says of an
option goes before what is here, but for a list, to which XLA adds ours.
"""

import logging
import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

logger = logging.getLogger(__name__)

Options = Mapping[str, bool | int | str]
"""Name -> value, as `jax.jit` takes them."""

LAYERS, OTHERS = "layers", "others"
"""Programs with the model's layers in them, and all other programs, which have the product with the head at most."""

GPU = "gpu"
# cuBLAS picks a kernel for each product by itself, and XLA tries none. It would by default, in the pool that the KV
# cache fills, with operands of its own, 1 GiB of them for the head of an 8B Llama: what was not compiled before the
# cache was there failed. On an H100 that Llama in bfloat16 is as fast either way (32 requests: 3,032 and 3,020
# tokens/s, prompts of 2,048: 39,213 and 39,044), and its first token came after 2.1 s in place of 6.2.
UNTRIED: Options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
# Where a program seems to need more memory than there is, XLA computes small things again in place of keeping them: for
# a KV cache that fills a GPU it always seems so, since XLA counts a cache that goes in and comes out twice. But it does
# so after it has decided which arrays are overwritten in place. Where each request's tokens stand is read again from an
# array that the step has already brought up to date: decodes beside prompts were one position off, on an H200 with
# default options (jax 0.11.2; 0.12 compiles it so, too).
ONCE: Options = {"xla_disable_hlo_passes": "rematerialization"}
# XLA makes one product of those with queries', keys' and values' weights, and writes the weights side by side for it,
# in every step: 1.1 ms of 9.8, for that Llama.
APART: Options = {"xla_gpu_dot_merger_threshold_mb": 0}
# XLA launches sequences of kernels as graphs of CUDA, but no loops: the host reads a loop's condition in each turn. An
# option (xla_gpu_enable_command_buffer) puts loops into graphs too. On an H200 with jax 0.11.2 a run of decode steps
# then came back at once with nothing computed. So what a GPU is to compute without waiting for the host has no loop.

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
    GPU: {**ONCE, **UNTRIED, **APART},
}
"""Kind of device, or platform -> options of programs with layers."""

OTHER_OPTIONS: Mapping[str, Options] = {GPU: {**ONCE, **UNTRIED}}
"""The same of all other programs."""


def compiler_options(mesh: Mesh | AbstractMesh, converts: bool = False) -> dict[str, Options]:
    """`LAYERS` or `OTHERS` -> options of these programs on the devices of `mesh`; without an entry XLA's defaults.

    `converts`: weights of layers have fewer bits than what they are multiplied with, see `tries_products`. An option
    that the installed compiler does not know is left out, with a warning: it may be older or newer.
    """
    if isinstance(mesh, AbstractMesh):
        return {}  # there is no compiler for it here
    device = mesh.devices.flat[0]
    layers, others = (
        options.get(device.device_kind, options.get(device.platform, {})) for options in (LAYER_OPTIONS, OTHER_OPTIONS)
    )
    if tries_products(device.platform, converts):
        layers = {name: value for name, value in layers.items() if name not in UNTRIED}
    said = os.environ.get("XLA_FLAGS", "")
    ours = {**layers, **others}
    wanted = {name: value for name, value in ours.items() if name in ONCE or f"--{name}=" not in said}
    if wanted and refusal(mesh, wanted) is not None:
        wanted = {name: value for name, value in wanted.items() if is_known(mesh, name, value)}
    kinds = {LAYERS: layers, OTHERS: others}
    given = {kind: {name: x for name, x in options.items() if name in wanted} for kind, options in kinds.items()}
    return {kind: options for kind, options in given.items() if options}


def tries_products(platform: str, converts: bool) -> bool:
    """Whether XLA, when it compiles the layers of a model, times kernels for their products on the device.

    On a GPU, where weights are converted on their way into a product: XLA's own kernels do so, cuBLAS's cannot.
    """
    return platform == GPU and converts


def is_known(mesh: Mesh, name: str, value: bool | int | str) -> bool:
    """Whether the compiler for these devices takes an option. A warning says why not."""
    if (error := refusal(mesh, {name: value})) is not None:
        logger.warning("programs are compiled without %s, which this compiler does not take: %s", name, error)
    return error is None


def refusal(mesh: Mesh, options: Options) -> Exception | None:
    """Why the compiler for these devices does not take the options: it is asked for a program that does nothing."""
    whole = NamedSharding(mesh, PartitionSpec())
    nothing = jax.jit(lambda: jnp.int32(0), out_shardings=whole, compiler_options=dict(options))
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            nothing.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        return error
    return None
