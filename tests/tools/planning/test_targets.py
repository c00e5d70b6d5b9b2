"""Targets by name: what is known of them, and a refusal that helps for every other name."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpaged.errors import ConfigError
from jaxpaged.params.sharding import MODEL_AXES
from jaxpaged.tools.planning.targets import CHIPS, COMPILED_GPUS, GPUS, parse_target, shapes_mesh
from pallas_kernels import gpu_targets, tpu_targets

NEEDS_TPU_COMPILER = pytest.mark.skipif(tpu_targets.why_not() is not None, reason=str(tpu_targets.why_not()))
TOPOLOGIES = [
    "v5e:1x1",
    "v5e:2x2",
    "v5e:2x4",
    "v5e:4x2",
    "v5e:4x4",
    "v5e:4x8",
    "v5p:1x1x1",
    "v5p:2x2x1",
    "v5p:2x2x2",
    "v5p:2x2x4",
    "v5p:2x2x3",
    "v6e:1x1",
    "v6e:1x4",
    "v6e:2x2",
    "v6e:2x4",
    "v6e:4x2",
    "v6e:4x4",
    "tpu7x:1x1x1",
    "tpu7x:2x2x1",
    "tpu7x:2x2x2",
]


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_can_be_named_alone_and_in_numbers(name):
    one, eight = parse_target(name), parse_target(f"{name.upper()}:8")
    assert (one.num_devices, eight.num_devices) == (1, 8)
    assert one.device == eight.device
    assert one.compiles == (name in COMPILED_GPUS and gpu_targets.why_not() is None)
    assert 1e9 < one.device.bandwidth < one.device.matmul_bf16


@pytest.mark.parametrize("name", CHIPS)
def test_every_tpu_has_memory_and_rates_in_a_plausible_order(name):
    device = parse_target(f"{name}:2x2", compile=False).device
    assert 10 * 2**30 < device.memory < 200 * 2**30
    assert device.links < device.bandwidth < device.matmul_bf16


@pytest.mark.parametrize(("name", "devices"), [("v5e:2x4", 8), ("v5p:2x2x1", 4), ("v6e:1x1", 1), ("tpu7x:2x2x1", 8)])
def test_a_topology_has_as_many_devices_as_programs_see(name, devices):
    assert parse_target(name, compile=False).num_devices == devices


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v6:2x4", "Did you mean 'v6e'"),
        ("h10", "Did you mean 'h100'"),
        ("moon", "Known are v5e:AxB"),
        ("h100-8", "Did you mean 'h100:8'"),
        ("8xh200", "Did you mean 'h200:8'"),
        ("a100-80gb-4", "Did you mean 'a100-80gb:4'"),
        ("v6e", "shape of its topology, as in v6e:2x4 .* as in v6e-8"),
        ("v6e:2x", "shape of its topology"),
        ("v6e:0x4", "shape of its topology"),
        ("v6e:two", "shape of its topology"),
        ("h100:0", "write a number"),
        ("h100:2x4", "write a number"),
    ],
)
def test_a_target_that_does_not_exist_is_refused_with_what_does(name, words):
    with pytest.raises(ConfigError, match=words):
        parse_target(name)


@pytest.mark.parametrize("name", [*TOPOLOGIES, *(f"{gpu}:{n}" for gpu in GPUS for n in (1, 8, 16))])
def test_every_split_of_every_target_has_a_mesh_or_is_refused_with_the_sizes_that_do(name):
    check_every_split(parse_target(name, compile=False))


@pytest.mark.aot_tpu
@NEEDS_TPU_COMPILER
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_devices_of_a_topology_split_as_its_shape_does(name):
    shape, target = parse_target(name, compile=False), parse_target(name)
    check_every_split(target)
    assert (target.num_devices, target.sizes, target.device) == (shape.num_devices, shape.sizes, shape.device)
    assert target.num_hosts == shape.num_hosts == len({device.process_index for device in target.devices})


def check_every_split(target):
    for size in range(1, target.num_devices + 2):
        if size in target.sizes:
            assert dict(target.mesh(size).shape) == {"expert": 1, "tensor": size}
            continue
        with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}, ") as refused:
            target.mesh(size)
        if size <= target.num_devices:
            assert str(refused.value).endswith(f"Sizes that do: {', '.join(map(str, target.sizes))}.")
    assert target.sizes[0] == 1 and target.sizes[-1] == target.num_devices
    assert target.num_hosts > 1 or set(target.host_sizes) >= set(target.sizes)


@pytest.mark.aot_tpu
@NEEDS_TPU_COMPILER
@pytest.mark.parametrize("name", ["v5e:2x4", "tpu7x:2x2x1"])
def test_the_compiler_takes_collectives_over_every_mesh(name):
    target = parse_target(name)
    for size in target.sizes:
        mesh = target.mesh(size)
        a = jax.ShapeDtypeStruct((128, size * 128), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, MODEL_AXES)))
        b = jax.ShapeDtypeStruct((size * 128, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P(MODEL_AXES)))
        product = jax.jit(lambda a, b: a @ b, out_shardings=NamedSharding(mesh, P())).lower(a, b).compile()
        assert ("all-reduce" in product.as_text()) == (size > 1)


def test_a_mesh_of_shapes_has_a_size_and_no_devices():
    assert dict(shapes_mesh(4).shape) == {"expert": 1, "tensor": 4}
    assert dict(parse_target("h100:4").mesh(4, True).shape) == {"expert": 4, "tensor": 1}
