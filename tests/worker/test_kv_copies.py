"""Blocks leave the device in one form and come back to it, whatever the layout of the attention backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.kv_cache_spec import AttentionSpec, LatentSpec
from jaxpaged.layers.attention import AttentionContext
from jaxpaged.worker.kv_blocks import tensor_struct
from jaxpaged.worker.kv_transfer.programs import lower_gather, lower_scatter, page_shape

ATTENTION = AttentionSpec(block_size=8, num_kv_heads=2, head_dim=16, dtype_bytes=2)
LATENT = LatentSpec(block_size=8, width=24, dtype_bytes=2)


@pytest.mark.parametrize("spec", [ATTENTION, LATENT], ids=["heads", "latents"])
@pytest.mark.parametrize(("backend", "num_devices"), [("reference", 1), ("reference", 2), ("tpu-interpret", 1)])
def test_pages_come_back_as_they_were(backend, num_devices, spec):
    mesh = make_mesh(num_devices)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    structs = [tensor_struct(AttentionContext(mesh, backend), spec, 6, jnp.bfloat16)] * 2
    scatter = lower_scatter(structs, spec, backend, whole, 3).compile()
    gather = lower_gather(structs, spec, backend, whole, 4).compile()
    zeros = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), structs)
    shape = (3, 2, *page_shape(spec))
    pages = np.random.default_rng(1).standard_normal(shape).astype(jnp.bfloat16)
    written = scatter(zeros, np.array([4, -1, 2], np.int32), pages)
    found = np.asarray(gather(written, np.array([2, 4, 1, -1], np.int32)))
    assert (found[:2] == pages[[2, 0]]).all()
    assert not found[2:].any(), "padding was written"
