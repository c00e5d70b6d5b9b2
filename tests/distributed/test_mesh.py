"""The mesh: as many devices as asked for, or an error that says how to get them."""

import jax
import pytest

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.errors import ConfigError


@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_mesh_has_the_first_devices_on_its_axis(size):
    mesh = make_mesh(size)
    assert dict(mesh.shape) == {"model": size}
    assert list(mesh.devices.flat) == jax.devices()[:size]


def test_the_devices_can_be_given():
    devices = jax.devices()[4:6]
    assert list(make_mesh(2, devices).devices.flat) == devices


def test_too_few_devices_are_an_error_that_says_how_to_get_more():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 9, but .* 8 cpu .*device_count=9"):
        make_mesh(9)
