"""A Ray cluster of several nodes, which are raylets of this machine, each with a loopback address of its own."""

import asyncio
import contextlib

import pytest

from jaxpaged import AsyncLLM
from jaxpaged.config import EngineConfig
from jaxpaged.engine.process.ray_seats import reserved_seats
from jaxpaged.errors import ConfigError
from jaxpaged.executor.device_slices import Host
from tests.end_to_end.test_processes import COUNT, NAME, OPTIONS, answer, free_port_of_three
from tests.models.checkpoints import write_checkpoint
from tests.models.paged import golden_of

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
HEAD = "127.0.0.2"  # Ray takes 127.0.0.1 for the address of this machine


@contextlib.contextmanager
def cluster_of(processors, monkeypatch):
    """A cluster to which `ray` is connected. `processors`: of each node. Yields it, and what adds a node."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args=node_args(2, processors[0], include_dashboard=False))
    try:
        add = lambda number, count: cluster.add_node(**node_args(number, count))
        for number, count in enumerate(processors[1:], 3):
            add(number, count)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        ray.init(address=cluster.address)
        yield cluster, add
    finally:
        ray.shutdown()
        cluster.shutdown()


def node_args(number, processors, **more):
    return {"num_cpus": processors, "node_ip_address": f"127.0.0.{number}", **more}


def parallel(**options):
    return EngineConfig.from_options(model="demo", distributed_executor_backend="ray", **options).parallel


def places():
    """Where the processes of each group are that has room, the first of them first."""
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    groups = [each for each in ray.util.placement_group_table().values() if each["state"] == "CREATED"]
    return sorted([address[node] for _, node in sorted(each["bundles_to_node_id"].items())] for each in groups)


@pytest.mark.slow
def test_processes_are_spread_over_nodes_and_too_few_are_said_with_what_is_missing(monkeypatch):
    nothing = Host("cpu", (), ())
    with cluster_of((1, 1), monkeypatch) as (_, add):
        wanted = parallel(nnodes=3, tensor_parallel_size=3)
        words = (
            rf"no room for 3 processes .* each needs 1 CPU, and the first must be on this node, {HEAD}\. .* {HEAD} has "
            r"1 CPU.*; free are 2 CPU of the 3 CPU that all need"
        )
        with pytest.raises(ConfigError, match=words):
            reserved_seats(wanted, ray, nothing, seconds=1.0)
        add(4, 1)
        assert reserved_seats(wanted, ray, nothing, seconds=20.0).address == HEAD
        assert [(each[0], set(each)) for each in places()] == [(HEAD, {HEAD, "127.0.0.3", "127.0.0.4"})]


async def live(llm, cluster, add):
    wanted = golden_of(NAME)["greedy"][:COUNT]
    of_core = lambda number: answer(llm, f"of core {number}", data_parallel_rank=number)
    assert await asyncio.gather(of_core(0), of_core(1)) == [wanted] * 2
    assert (await llm.executor_stats())["num_processes"] == 4, "two for each core"
    assert places() == [[HEAD, "127.0.0.3"], [HEAD, "127.0.0.4"]]
    # One node goes: the core that computes there starts again where there is room, and the other one goes on.
    [lost] = [each for each in cluster.worker_nodes if each.node_ip_address == "127.0.0.4"]
    await asyncio.to_thread(cluster.remove_node, lost, allow_graceful=False)
    states = lambda: [core.link._supervisor.state.phase for core in llm._cores.all]
    while (now := states()).count("serving") == 2:
        await asyncio.sleep(0.1)
    assert await of_core(now.index("serving")) == wanted
    add(5, 1)
    while states().count("serving") < 2:
        await asyncio.sleep(0.1)
    assert await asyncio.gather(of_core(0), of_core(1)) == [wanted] * 2
    assert places() == [[HEAD, "127.0.0.3"], [HEAD, "127.0.0.5"]]


@pytest.mark.slow
def test_engine_cores_compute_over_nodes_and_outlive_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    write_checkpoint(NAME, tmp_path / "model")
    with cluster_of((2, 1, 1), monkeypatch) as (cluster, add):
        monkeypatch.chdir(tmp_path)  # where no node was started
        config = EngineConfig.from_options(
            model="model",
            distributed_executor_backend="ray",
            tensor_parallel_size=2,
            nnodes=2,
            data_parallel_size=2,
            master_port=free_port_of_three(times=2),
            **OPTIONS,
        )
        llm = AsyncLLM.from_config(config)
        try:
            asyncio.run(live(llm, cluster, add))
        finally:
            llm.shutdown()
