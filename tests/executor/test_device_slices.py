"""Which devices each of several engine cores gets, on hosts that are not here, and which divisions are refused."""

import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.executor import device_slices
from jaxpaged.executor.device_slices import ALL_DEVICES, Host, this_host
from jaxpaged.executor.device_slices import device_slices as slices_of

GPUS = Host("gpu", [str(i) for i in range(8)], range(32))
CHIPS = Host("tpu", [str(i) for i in range(4)], range(32))


def test_one_core_has_whatever_there_is_as_it_finds_it():
    assert slices_of(1, 4, Host("gpu", ["0"], [])) == [ALL_DEVICES]


def test_gpus_are_dealt_out_in_order():
    assert [each.environment for each in slices_of(3, 2, GPUS)] == [
        {"CUDA_VISIBLE_DEVICES": names} for names in ("0,1", "2,3", "4,5")
    ]


def test_chips_of_a_tpu_come_with_their_box_and_a_port_of_their_own():
    first, second = (each.environment for each in slices_of(2, 2, CHIPS))
    assert (first["TPU_VISIBLE_CHIPS"], second["TPU_VISIBLE_CHIPS"]) == ("0,1", "2,3")
    assert first["TPU_CHIPS_PER_PROCESS_BOUNDS"] == second["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,2,1"
    assert first["TPU_MESH_CONTROLLER_PORT"] != second["TPU_MESH_CONTROLLER_PORT"]


def test_processors_are_shared_evenly_while_there_are_enough():
    cpu = Host("cpu", (), range(7))
    assert [each.processors for each in slices_of(2, 1, cpu)] == [{0, 1, 2}, {3, 4, 5}]
    assert slices_of(2, 4, cpu) == [ALL_DEVICES] * 2


@pytest.mark.parametrize(
    ("cores", "each", "host", "said"),
    [
        (3, 4, GPUS, "data_parallel_size is 3, and each core has 4 devices .*, which takes 12, but this host has 8"),
        (5, 1, CHIPS, "takes 5, but this host has 4 of the platform 'tpu'"),
        (1 + 1, 3, Host("tpu", "01234567", []), "can be divided into slices of 1, 2, 4, 8 only"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_numbers(cores, each, host, said):
    with pytest.raises(ConfigError, match=said):
        slices_of(cores, each, host)


def test_a_host_is_known_by_its_drivers_plugins_and_environment(tmp_path, monkeypatch):
    installed = set()
    monkeypatch.setattr(device_slices, "is_installed", installed.__contains__)
    gpus = tmp_path / "proc" / "driver" / "nvidia" / "gpus"
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (gpus / name).mkdir(parents=True)
    (tmp_path / "dev" / "vfio").mkdir(parents=True)
    for name in ("0", "1", "vfio"):
        (tmp_path / "dev" / "vfio" / name).touch()
    kind = lambda **environment: (lambda host: (host.platform, list(host.devices)))(this_host(tmp_path, environment))
    assert kind() == ("cpu", []), "jax could use none of them"
    installed.add("libtpu")
    assert kind() == ("tpu", ["0", "1"])
    assert kind(TPU_VISIBLE_CHIPS="1") == ("tpu", ["1"])
    installed.add("jax_plugins.xla_cuda13")
    assert kind() == ("gpu", ["0", "1"])
    assert kind(CUDA_VISIBLE_DEVICES="3,5") == ("gpu", ["3", "5"])
    assert kind(JAX_PLATFORMS="cpu") == ("cpu", [])
