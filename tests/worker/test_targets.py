"""Targets by name: what is known of them, and a refusal that helps for every other name."""

import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.worker.targets import CHIPS, GPUS, parse_target, shapes_mesh


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_can_be_named_alone_and_in_numbers(name):
    one, eight = parse_target(name), parse_target(f"{name.upper()}:8")
    assert (one.num_devices, eight.num_devices) == (1, 8)
    assert one.device == eight.device and not one.compiles
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
        ("v6e", "shape of its topology"),
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


def test_a_mesh_of_shapes_has_a_size_and_no_devices():
    assert dict(shapes_mesh(4).shape) == {"model": 4}
    assert dict(parse_target("h100:4").mesh(4).shape) == {"model": 4}
