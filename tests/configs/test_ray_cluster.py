"""configs/ for a Ray cluster: the command that its top names is one that Ray's nodes can serve."""

import re
import shlex

from tests.configs.test_recipes import CONFIGS, options_of, read


def test_the_engine_on_a_ray_cluster_takes_every_node():
    cluster = read("ray/cluster.yaml")
    [command] = re.findall(r"'jaxpaged (serve .*)'", (CONFIGS / "ray/cluster.yaml").read_text(encoding="utf-8"))
    server, engine = options_of(shlex.split(command))
    assert engine.parallel.distributed_executor_backend == "ray" and server.host == "127.0.0.1"
    assert engine.parallel.nnodes == 1 + len(cluster["provider"]["worker_ips"]) == 1 + cluster["max_workers"]
    assert engine.parallel.tensor_parallel_size == 8 * engine.parallel.nnodes
