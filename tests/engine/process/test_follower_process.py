"""What hosts that compute together must have alike, and the secret by which they know each other."""

import os
import queue
import signal

import pytest

from jaxpaged import LLM
from jaxpaged.config import EngineConfig
from jaxpaged.engine.process import follower_process
from jaxpaged.engine.process.core_launcher import core_config
from jaxpaged.engine.process.follower_process import FollowerChild, FollowerStart
from jaxpaged.engine.process.gathering import end_children, follow_other_host, given_here, shared_secret
from jaxpaged.errors import ConfigError


def config(**options):
    return EngineConfig.from_options(model="demo", **options)


def test_hosts_compare_versions_and_every_option_but_their_own():
    first, second = (given_here(config(nnodes=2, node_rank=rank, group_secret_file=f"of-{rank}")) for rank in (0, 1))
    assert first == second
    assert {"jax", "jaxpaged", "python", "max_num_seqs"} <= first.keys()
    assert given_here(config(nnodes=2, max_num_seqs=3)) != first


def test_each_engine_core_has_ports_of_its_own():
    options = config(distributed_executor_backend="ray", nnodes=2, tensor_parallel_size=2, data_parallel_size=3)
    ports = [core_config(options, number).parallel.master_port for number in range(3)]
    assert ports == [29501, 29504, 29507]


def test_a_secret_is_read_and_one_that_is_no_secret_is_refused(tmp_path):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n", encoding="ascii")
    assert shared_secret(config(group_secret_file=str(file)).parallel) == b"0123456789abcdef"
    file.write_text("short", encoding="ascii")
    for given, words in ((str(file), "holds 5 letters"), (str(tmp_path / "none"), "cannot read"), (None, "openssl")):
        with pytest.raises(ConfigError, match=words):
            shared_secret(config(nnodes=2, group_secret_file=given).parallel)


def test_a_rank_that_is_not_there_is_refused(tmp_path):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef", encoding="ascii")
    with pytest.raises(ConfigError, match="node_rank is 2, but nnodes is 2"):
        follow_other_host(config(nnodes=2, node_rank=2, group_secret_file=str(file)))


def test_who_follows_ends_in_peace_or_is_ended(monkeypatch):
    """One that was stopped cannot end itself."""
    monkeypatch.setattr(follower_process, "PROGRAM", "import os; [print(os.read(0, 4096)) for _ in range(2)]")
    start = FollowerStart(1, ("", ""), b"", 20, "text", 20.0)
    reasons = [queue.Queue() for _ in range(2)]
    children = [FollowerChild(start, each.put) for each in reasons]
    children[0]._process.stdin.close()
    end_children(children[:1], 20.0)
    os.kill(children[1]._process.pid, signal.SIGSTOP)
    end_children(children, 0.1)
    assert reasons[0].get(timeout=20).endswith("ended with exit status 0")
    assert "SIGKILL" in reasons[1].get(timeout=20)


def test_an_engine_in_this_process_computes_alone():
    with pytest.raises(ConfigError, match="ask for 2 processes, but here the engine computes in the caller's"):
        LLM("demo", tensor_parallel_size=2, distributed_executor_backend="mp")
