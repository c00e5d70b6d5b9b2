"""What is asked of Ray, by a stand-in for the few calls of it; a real cluster: end_to_end/test_processes.py."""

import sys
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.process import ray_seats
from jaxpaged.engine.process.follower_process import FollowerStart
from jaxpaged.engine.process.ray_seats import opened_ray, reserved_seats
from jaxpaged.errors import ConfigError
from jaxpaged.executor.device_slices import Host


class RayError(Exception):
    pass


class StandIn:
    """Of Ray: a cluster of nodes with the same resources, whose actors end as `end` says, with words or an error."""

    def __init__(self, nodes, has, room=True, end=lambda: "ended"):
        self._nodes, self._has, self._room, self._end = nodes, has, room, end
        self.asked, self.removed, self.actors = [], [], []
        self.exceptions = SimpleNamespace(RayError=RayError)
        strategies = SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: placement_group_bundle_index
        )
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: nodes[0],
            placement_group=self._group,
            scheduling_strategies=strategies,
            placement_group_table=lambda group: {"bundles_to_node_id": dict(enumerate(nodes))},
            remove_placement_group=self.removed.append,
        )

    def _group(self, bundles, strategy):
        self.asked.append((bundles, strategy))
        return SimpleNamespace(wait=lambda seconds: self._room)

    def nodes(self):
        return [{"NodeManagerAddress": name, "Resources": self._has, "Alive": True} for name in self._nodes]

    def available_resources(self):
        return {"CPU": 1.0}

    def shutdown(self):
        self.is_shut_down = True

    def remote(self, kind):
        def options(**given):
            actor = SimpleNamespace(
                devices=SimpleNamespace(remote=lambda: lambda: {"CUDA_VISIBLE_DEVICES": "4,5"}),
                follow=SimpleNamespace(remote=lambda *told: self.actors.append((given, told)) or self._end),
            )
            return SimpleNamespace(remote=lambda: actor)

        return SimpleNamespace(options=options)

    def wait(self, references, timeout):
        return references, []

    def get(self, reference):
        return reference()


def parallel(**options):
    return EngineConfig.from_options(model="demo", distributed_executor_backend="ray", **options).parallel


def seats(ray, platform="cpu", **options):
    return reserved_seats(parallel(**options), ray, Host(platform, (), ()), seconds=0.0)


def test_each_process_has_a_share_and_the_first_is_here(monkeypatch):
    ray = StandIn(["10.0.0.1", "10.0.0.2"], {"CPU": 8.0, "GPU": 2.0})
    found = seats(ray, "gpu", nnodes=2, tensor_parallel_size=4)
    assert ray.asked == [([{"CPU": 1, "GPU": 2, "node:10.0.0.1": 0.001}, {"CPU": 1, "GPU": 2}], "SPREAD")]
    assert found.address == "10.0.0.1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found.take_own()
    assert ray_seats.os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert seats(ray, nnodes=2, master_addr="10.1.0.1").address == "10.1.0.1"


def test_nothing_listens_beyond_loopback_where_all_processes_are_here():
    assert seats(StandIn(["10.0.0.1"], {"CPU": 8.0}), nnodes=2).address == "127.0.0.1"


def gone():
    raise RayError("The actor died.\nMore.")


@pytest.mark.parametrize(("end", "words"), [(lambda: "its end", "its end"), (gone, "Ray actor ended: The actor died.")])
def test_the_end_of_an_actor_is_told_from_another_thread(end, words, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--some")
    ray, heard, came = StandIn(["a"], {"TPU": 4.0}, end=end), [], threading.Event()
    found = seats(ray, "tpu", nnodes=2, tensor_parallel_size=8)
    start = FollowerStart(1, ("tcp://a:1", "tcp://a:2"), b"secret", 20, "text", 20.0)
    found.start(start, lambda told: (heard.append(told), came.set()))
    assert came.wait(10)
    assert words in heard[0]
    [(given, (told, environment, folder))] = ray.actors
    assert given == {"num_cpus": 1, "num_gpus": 0, "resources": {"TPU": 4}, "scheduling_strategy": 1}
    assert msgspec.msgpack.decode(told, type=FollowerStart) == start
    assert environment["XLA_FLAGS"] == "--some" and folder == ray_seats.os.getcwd()
    found.release()
    assert ray.is_shut_down


def test_leaving_waits_for_no_actor(monkeypatch):
    ray = StandIn(["a"], {"CPU": 4.0})
    ray.wait = lambda references, timeout: time.sleep(0.01) or ([], references)  # it never ends
    found = seats(ray, nnodes=2, tensor_parallel_size=2)
    found.start(FollowerStart(1, ("tcp://a:1", "tcp://a:2"), b"secret", 20, "text", 20.0), print)
    before = time.monotonic()
    found.release()
    assert ray.is_shut_down and time.monotonic() - before < 5
    [thread] = found._threads
    assert not thread.is_alive(), "it would ask a cluster that was left"


def test_too_few_resources_are_named():
    ray = StandIn(["10.0.0.1", "10.0.0.2"], {"CPU": 2.0, "GPU": 1.0}, room=False)
    words = (
        "no room for 4 processes .* each needs 1 CPU and 2 GPU, .* on this node, 10.0.0.1. .* 10.0.0.2 has 2 CPU and 1 "
        "GPU; free are 1 CPU and 0 GPU of the 4 CPU and 8 GPU that all need."
    )
    with pytest.raises(ConfigError, match=words):
        seats(ray, "gpu", nnodes=4, tensor_parallel_size=8)
    assert len(ray.removed) == 1


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(ray_seats, "is_installed", lambda module: False)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[ray\]'"):
        opened_ray()


def test_several_cores_need_a_cluster_that_they_share(monkeypatch):
    def init(**options):
        assert options["address"] == "auto", "a cluster was started for one of them"
        raise ConnectionError("none")

    for name in ("ray", "ray.util", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init))
    monkeypatch.setattr(ray_seats, "is_installed", lambda module: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(
        ConfigError, match="data_parallel_size is 2, .* in no Ray cluster. Run `ray start --head` first"
    ):
        opened_ray(num_cores=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "nnodes is 1"),
        ({"nnodes": 2, "node_rank": 1}, "node_rank is 1: Ray starts the others"),
        ({"nnodes": 2, "group_secret_file": "f"}, "group_secret_file is f"),
    ],
)
def test_options_that_contradict_ray_are_refused(options, words):
    with pytest.raises(ConfigError, match=f"distributed_executor_backend is ray, and {words}"):
        parallel(**options)
