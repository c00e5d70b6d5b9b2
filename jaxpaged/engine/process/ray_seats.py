"""Processes that compute as one, where Ray has room: their devices are reserved, each is started, its end is told.

Ray places and supervises, nothing else: an actor starts the very process that `mp` starts (`follower_process.py`), and
steps go over the same encrypted sockets. Rank 0 is the process that reserves; its share of the cluster is held for it.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from jaxpaged.config.sections import ParallelConfig
from jaxpaged.engine.process.follower_process import FollowerChild, FollowerStart, versions
from jaxpaged.errors import ConfigError, how_to_install, is_installed
from jaxpaged.executor.device_slices import Host, this_host

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PLACE_SECONDS = 60.0
"""How long the cluster may take to have room: nodes join, and an engine that ended gives back what it had."""
TELL_SECONDS = 10.0
LOOK_SECONDS = 0.5
LEAVE_SECONDS = 10.0
"""How long leaving waits for a thread that looks so often; where the cluster's head is gone Ray may never answer it."""
RESOURCES = {"gpu": "GPU", "tpu": "TPU"}
"""Platform -> what Ray calls its devices."""
OF_DEVICES = ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS")
"""Variables by which Ray gives an actor devices of its node."""
SAME_EVERYWHERE = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables that programs depend on; so do those that begin with JAX_."""


class Seat:
    """A Ray actor: a share of a node's devices, and the process that computes with it."""

    def devices(self) -> dict[str, str]:
        """The variables that say which devices of its node are its own."""
        return {name: os.environ[name] for name in OF_DEVICES if name in os.environ}

    def follow(self, start: bytes, environment: Mapping[str, str], folder: str) -> str:
        """Start the process, and return what ended it, in words. It ends with this actor. `folder`: where the paths of
        options begin that are relative; Ray begins where the node was started."""
        with contextlib.suppress(OSError):  # a node without it needs it for no path, or says which one is missing
            os.chdir(folder)
        os.environ.update(environment)
        told = msgspec.msgpack.decode(start, type=FollowerStart)
        ended: list[str] = []
        child = FollowerChild(msgspec.structs.replace(told, given={**told.given, **versions()}), ended.append)
        child.wait()
        while not ended:
            time.sleep(0.01)
        return ended[0]


class Seats:
    """Room for every process, rank 0 included, that `ray`, the module, has reserved in `group`, its placement group.

    `address`: where the others find this process.
    """

    def __init__(self, ray: Any, group: Any, share: Mapping[str, float], address: str):
        self.address = address
        self._ray, self._group, self._share = ray, group, share
        self._leaving = threading.Event()
        self._threads: list[threading.Thread] = []

    def take_own(self) -> None:
        """Let this process see those devices only that are reserved for it. Before devices start."""
        if self._share.keys() & set(RESOURCES.values()):
            os.environ.update(self._ray.get(self._actor(0).devices.remote()))

    def start(self, start: FollowerStart, on_end: Callable[[str], None]) -> None:
        """Start the process of a rank. `on_end` hears, from another thread, what ended it or its actor."""
        environment = {name: os.environ[name] for name in os.environ if name.startswith("JAX_")}
        environment |= {name: os.environ[name] for name in SAME_EVERYWHERE if name in os.environ}
        actor = self._actor(start.rank)  # Ray ends an actor that nobody refers to
        end = actor.follow.remote(msgspec.msgpack.encode(start), environment, os.getcwd())

        def watch(actor: Any = actor) -> None:
            while not self._ray.wait([end], timeout=LOOK_SECONDS)[0]:
                if self._leaving.is_set():
                    return
            try:
                on_end(self._ray.get(end))
            except self._ray.exceptions.RayError as error:
                on_end(f"its Ray actor ended: {str(error).strip().splitlines()[0]}")

        self._threads.append(threading.Thread(target=watch, name=f"actor of rank {start.rank}", daemon=True))
        self._threads[-1].start()

    def release(self) -> None:
        """Leave the cluster: Ray ends the actors, and takes back what was reserved. One of this machine alone ends."""
        self._leaving.set()
        for thread in self._threads:
            thread.join(LEAVE_SECONDS)  # Ray ends a process that asks it after it was left
        self._ray.shutdown()

    def _actor(self, rank: int) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=rank
        )
        others = {name: amount for name, amount in self._share.items() if name not in ("CPU", "GPU")}
        return (
            self._ray.remote(Seat)
            .options(
                num_cpus=self._share["CPU"],
                num_gpus=self._share.get("GPU", 0),
                resources=others,
                scheduling_strategy=strategy,
            )
            .remote()
        )


def opened_ray(num_cores: int = 1) -> Any:
    """Ray's module, connected to the cluster that this machine belongs to or RAY_ADDRESS names, else to one of its own
    on the loopback device, which ends with this process; several engine cores would each have one, and the same
    devices in it. Raises ConfigError."""
    if not is_installed("ray"):
        raise ConfigError(
            f"distributed_executor_backend is ray, but Ray is not installed. On every node, {how_to_install('ray')}."
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # who wants to tell Ray's makers of this says so
    import ray
    import ray.util.scheduling_strategies

    try:
        ray.init(address="auto", logging_level=logging.WARNING)
        return ray
    except ConnectionError as error:
        if given := os.environ.get("RAY_ADDRESS"):
            raise ConfigError(f"RAY_ADDRESS is {given}, but no Ray cluster answers there: {error}") from error
        if num_cores > 1:
            raise ConfigError(
                f"data_parallel_size is {num_cores}, so several engine cores ask Ray for devices, but this machine is "
                "in no Ray cluster. Run `ray start --head` first, or set RAY_ADDRESS."
            ) from error
    ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING, _node_ip_address=LOOPBACK)
    logger.info("there is no Ray cluster here, so one of this machine alone was started")
    return ray


def reserved_seats(
    parallel: ParallelConfig, ray: Any, host: Host | None = None, seconds: float = PLACE_SECONDS
) -> Seats:
    """Room for all processes of `parallel`, the first of them on this node, and the others spread over as many nodes as
    there are. Raises ConfigError when there is not enough within `seconds`."""
    size, own = parallel.num_processes, ray.util.get_node_ip_address()
    share: dict[str, float] = {"CPU": 1}
    if (platform := (host or this_host()).platform) in RESOURCES:
        share[RESOURCES[platform]] = max(parallel.tensor_parallel_size // size, 1)
    bundles = [{**share, f"node:{own}": 0.001}, *[dict(share) for _ in range(size - 1)]]
    group = ray.util.placement_group(bundles, strategy="SPREAD")
    deadline = time.monotonic() + seconds
    while not group.wait(max(min(deadline - time.monotonic(), TELL_SECONDS), 0)):
        lacking = shortage(share, size, own, ray.nodes(), ray.available_resources())
        if time.monotonic() >= deadline:
            ray.util.remove_placement_group(group)
            raise ConfigError(
                f"Ray found no room for {size} processes (nnodes) within {seconds:g} s: {lacking} Add nodes, end what "
                "has theirs, or lower nnodes or tensor_parallel_size."
            )
        logger.info("waiting for room in the Ray cluster: %s", lacking)
    nodes = set(ray.util.placement_group_table(group)["bundles_to_node_id"].values())
    given = parallel.master_addr != LOOPBACK
    return Seats(ray, group, share, parallel.master_addr if given or len(nodes) == 1 else own)


def shortage(
    share: Mapping[str, float], size: int, own: str, nodes: Sequence[Mapping[str, Any]], free: Mapping[str, float]
) -> str:
    """What is needed, what each node has, and what is free, as a few sentences."""
    has = [f"{node['NodeManagerAddress']} has {amounts(share, node['Resources'])}" for node in nodes if node["Alive"]]
    return (
        f"each needs {amounts(share, share)}, and the first must be on this node, {own}. Of the cluster's nodes, "
        f"{'; '.join(has) or 'none is alive'}; free are {amounts(share, free)} of the "
        f"{amounts(share, {name: amount * size for name, amount in share.items()})} that all need."
    )


def amounts(names: Mapping[str, float], of: Mapping[str, float]) -> str:
    """ "2 CPU and 8 GPU"."""
    return " and ".join(f"{of.get(name, 0):g} {name}" for name in names)
