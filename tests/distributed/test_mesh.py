"""The mesh: as many devices as asked for, or an error that says how to get them."""

import jax
import pytest

from jaxpaged.distributed.mesh import make_mesh, sizes_of, torus_sizes
from jaxpaged.errors import ConfigError


@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_mesh_has_the_first_devices_on_its_axis(size):
    mesh = make_mesh(size)
    assert dict(mesh.shape) == {"expert": 1, "tensor": size}
    assert list(mesh.devices.flat) == jax.devices()[:size]
    spread = make_mesh(size, spreads_experts=True)
    assert dict(spread.shape) == {"expert": size, "tensor": 1}
    assert list(spread.devices.flat) == jax.devices()[:size]


def test_the_devices_can_be_given():
    devices = jax.devices()[4:6]
    assert list(make_mesh(2, devices).devices.flat) == devices


def test_too_few_devices_are_an_error_that_says_how_to_get_more():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 9, but .* 8 cpu .*device_count=9"):
        make_mesh(9)


class Chip:
    """A TPU device where it lies, which is all that its mesh asks for before jax builds it."""

    platform, core_on_chip = "tpu", 0

    def __init__(self, *coords):
        self.coords = coords


BOX_2X4 = [Chip(x, y, 0) for y in range(4) for x in range(2)]


@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_devices_of_a_torus_that_form_no_mesh_are_refused_with_the_sizes_that_do(size):
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size is {size}, .* Sizes that do: 1, 2, 4, 8\."):
        make_mesh(size, BOX_2X4)


def test_a_torus_with_a_hole_or_in_another_order_has_only_the_meshes_without_one():
    assert sizes_of(BOX_2X4) == [1, 2, 4, 8]
    assert sizes_of(BOX_2X4[:3]) == [1, 2]
    assert torus_sizes([(0, 0, 0), (1, 1, 0), (1, 0, 0), (0, 1, 0)]) == [1, 4]
    assert sizes_of(jax.devices()) == list(range(1, 9)) and sizes_of([]) == []


def test_devices_of_several_hosts_are_refused_where_one_process_takes_part(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="belong to 2 processes, .* --nnodes and --node-rank"):
        make_mesh(1)
