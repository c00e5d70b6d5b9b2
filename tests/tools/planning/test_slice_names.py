"""Google's names of slices: the topologies that they mean, and what is said of those that mean none."""

from itertools import pairwise

import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.tools.planning.targets import CUBES, PLANE, parse_target, topology_of


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("v5litepod-1", "v5e:1x1"),
        ("v5litepod-4", "v5e:2x2"),
        ("v5litepod-8", "v5e:2x4"),
        ("v5litepod-16", "v5e:4x4"),
        ("v5litepod-256", "v5e:16x16"),
        ("v5e-8", "v5e:2x4"),
        ("v6e-1", "v6e:1x1"),
        ("v6e-4", "v6e:2x2"),
        ("v6e-8", "v6e:2x4"),
        ("V6E-32", "v6e:4x8"),
        ("v6e-128", "v6e:8x16"),
        ("v5p-8", "v5p:2x2x1"),
        ("v5p-16", "v5p:2x2x2"),
        ("v5p-32", "v5p:2x2x4"),
        ("v5p-64", "v5p:2x4x4"),
        ("v5p-128", "v5p:4x4x4"),
        ("v5p-256", "v5p:4x4x8"),
        ("v5p-8192", "v5p:16x16x16"),
        ("tpu7x-2", "tpu7x:1x1x1"),
        ("tpu7x-8", "tpu7x:2x2x1"),
        ("v7x-16", "tpu7x:2x2x2"),
        ("ct5lp-hightpu-4t", "v5e:2x2"),
        ("ct5p-hightpu-4t", "v5p:2x2x1"),
        ("ct6e-standard-8t", "v6e:2x4"),
        ("tpu7x-standard-4t", "tpu7x:2x2x1"),
        ("tpu-v6e-slice:4x4", "v6e:4x4"),
        ("tpu-v5-lite-podslice:2x4", "v5e:2x4"),
        ("ironwood:2x2x1", "tpu7x:2x2x1"),
        ("v6e:2x4", "v6e:2x4"),
        ("h100:8", "h100:8"),
        ("moon", "moon"),
    ],
)
def test_googles_names_mean_a_topology(name, topology):
    assert topology_of(name) == topology


@pytest.mark.parametrize("name", ["v6e-8", "v5litepod-8", "v5p-16", "tpu7x-8", "ct6e-standard-8t"])
def test_a_slice_is_the_target_of_its_topology(name):
    assert parse_target(name, compile=False) == parse_target(topology_of(name), compile=False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v6e-7", "no slice of v6e has 7 chips. Known are 1, 4, 8, .*, as in v6e:2x2"),
        ("v5litepod-2", "has 2 chips"),
        ("v5p-4", "has 4 TensorCores, two a chip. Known are 2, 8, 16, .*, as in v5p:2x2x1"),
        ("v5p-384", "has 384 TensorCores"),
        ("ct6e-standard-2t", "has 2 chips"),
        ("v6e-512", "has 512 chips"),
        ("v4-8", "older generation"),
        ("v3-8", "older generation"),
        ("v2-32", "older generation"),
        ("v4:2x2x1", "older generation"),
        ("tpu-v4-podslice:2x2x1", "older generation"),
        ("v6e-0", "unknown target"),
        ("v6-8", "unknown target 'v6-8'. Did you mean 'v6e'"),
    ],
)
def test_a_slice_that_is_not_there_is_refused_with_those_that_are(name, words):
    with pytest.raises(ConfigError, match=words):
        parse_target(name, compile=False)


@pytest.mark.parametrize("shapes", [PLANE, CUBES])
def test_shapes_double_from_four_chips_on(shapes):
    sizes = [bounds[0] * bounds[1] * (bounds[2] if len(bounds) == 3 else 1) for bounds in shapes]
    assert sizes[:2] == [1, 4] and all(after == 2 * before for before, after in pairwise(sizes[1:]))
