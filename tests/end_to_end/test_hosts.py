"""Two hosts, which are two commands on this machine: what becomes of one that waits for another in vain, and of one
whose driver stops in the middle of a step."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxpaged.distributed.channel import SILENCE_SECONDS
from tests.end_to_end.conftest import started, stop
from tests.end_to_end.test_processes import OPTIONS, all_below, free_port_of_three
from tests.models.checkpoints import prompt_of, write_checkpoint
from tests.models.paged import golden_of

NAME = "qwen3"
SPARE_SECONDS = 20.0
"""Of a busy machine."""


def command(tmp_path, rank, port, seconds, secret="0123456789abcdef"):
    """What is typed on the host of a rank."""
    file = tmp_path / f"secret-{rank}"
    file.write_text(secret, encoding="ascii")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if name != "token_buckets"]
    return [
        sys.executable,
        "-m",
        "jaxpaged",
        "serve",
        str(tmp_path / "model"),
        "--port",
        "0",
        "--token-buckets",
        "16",
        *[each.removesuffix("=True") for each in flags],
        "-tp",
        "2",
        "--nnodes",
        "2",
        "--node-rank",
        str(rank),
        "--master-port",
        str(port),
        "--group-secret-file",
        str(file),
        "--distributed-timeout-seconds",
        str(seconds),
    ]


def begun(*command):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "XLA_FLAGS": ""}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_hosts_that_do_not_know_one_secret_wait_in_vain_and_say_for_whom(tmp_path):
    """To each of them the other is one that never came."""
    write_checkpoint(NAME, tmp_path / "model")
    port = free_port_of_three()
    hosts = [begun(*command(tmp_path, rank, port, 5, secret=f"secret of host {rank}")) for rank in (0, 1)]
    for rank, (host, words) in enumerate(
        zip(
            hosts,
            (r"rank 1 of 2 did not arrive within 5 s\. .* has the same secret", r"rank 1 waited .* for rank 0 at"),
        )
    ):
        _, told = host.communicate(timeout=120)
        assert host.returncode != 0 and re.search(words, told.splitlines()[-1]), f"host {rank} said {told}"
        assert "Traceback" not in told


def ask(address):
    body = json.dumps(
        {"prompt": prompt_of(NAME), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        | {"return_token_ids": True, "model": "small"}
    )
    request = urllib.request.Request(f"{address}/v1/completions", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.1)


@pytest.mark.exhaustive
def test_a_host_whose_driver_stops_in_mid_step_leaves_comes_back_and_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # each process has one device
    write_checkpoint(NAME, tmp_path / "model")
    port, wanted = free_port_of_three(), golden_of(NAME)["greedy"][:8]
    follower = begun(*command(tmp_path, 1, port, 45))
    threading.Thread(target=follower.stderr.read, daemon=True).start()
    driver = None
    try:
        own = ["--served-model-name", "small", "--step-timeout", "25"]
        driver, (address,) = started(*command(tmp_path, 0, port, 45), *own)
        threading.Thread(target=driver.stderr.read, daemon=True).start()
        assert ask(address) == wanted
        [core] = [pid for pid in all_below(driver.pid) if b"core_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        first = all_below(follower.pid)
        with ThreadPoolExecutor() as pool:
            doomed = [pool.submit(ask, address) for _ in range(4)]
            time.sleep(0.02)
            os.kill(core, signal.SIGSTOP)
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in first), SILENCE_SECONDS + SPARE_SECONDS)
            for each in doomed:
                with pytest.raises(urllib.error.HTTPError, match="50"):
                    each.result(timeout=120)
        assert ask(address) == wanted, "both have started again"
        stop(driver)
        assert follower.wait(timeout=SILENCE_SECONDS + SPARE_SECONDS) == 0
    finally:
        left = all_below(follower.pid) + (all_below(driver.pid) if driver else [])
        for each in (driver, follower):
            if each is not None:
                each.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), SPARE_SECONDS)
