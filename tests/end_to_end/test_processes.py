"""Several processes that compute as one say what one device says, and what becomes of one of them ends no client."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from jaxpaged import AsyncLLM, LoRARequest, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.distributed.channel import SILENCE_SECONDS
from jaxpaged.errors import CheckpointError, EngineRestartError
from tests.models.adapted import GOLDEN, write_other
from tests.models.checkpoints import prompt_of, write_checkpoint
from tests.models.paged import golden_of

NAME = "llama"
# One bucket that the prompt does not fit: it takes several steps.
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "max_model_len": 64,
    "block_size": 8,
    "num_gpu_blocks_override": 64,
    "skip_tokenizer_init": True,
    "num_scheduler_steps": 1,
}
COUNT = 8


def params(**more):
    return SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, detokenize=False, **more)


async def answer(llm, request_id, **more):
    """The token ids that a request gets."""
    return (await output_of(llm, request_id, **more)).token_ids


async def output_of(llm, request_id, logprobs=None, **more):
    asked = llm.generate({"prompt_token_ids": prompt_of(NAME)}, params(logprobs=logprobs), request_id, **more)
    outputs = [output async for output in asked]
    return outputs[-1].outputs[0]


def children(pid):
    """The processes that a process has started."""
    started = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):  # whichever did so
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has just ended
            started += [int(each) for each in thread.read_text(encoding="ascii").split()]
    return started


def command(pid):
    """The words that a process was started with; none once it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def core(others):
    """The process of the engine core. `others`: processes that tests before had started."""
    new = [pid for pid in children(os.getpid()) if pid not in others]
    [pid] = [pid for pid in new if b"core_process" in command(pid)]
    return pid


def all_below(pid):
    """The processes that a process has started, that these have started, and so on."""
    return [below for each in children(pid) for below in (each, *all_below(each))]


def followers(pid):
    """The processes that compute with the engine core `pid`."""
    return [each for each in all_below(pid) if b"run_follower" in command(each)]


def free_port_of_three(times=1):
    """The first of so many times three ports that nobody uses."""
    count = 3 * times
    return next(port for port in range(29511, 30000, 3) if all(is_free(each) for each in range(port, port + count)))


def is_free(port):
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


def ports_of(pids):
    """The ports at which processes listen on the loopback device, or on all."""
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = {os.readlink(link) for link in links if link.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {
        int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets
    }


def say_garbage(port):
    """What a stranger might: noise, another protocol, a greeting of zmq's without what follows, nothing."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47)
    for words in (bytes(range(256)) * 64, b"GET / HTTP/1.1\r\n\r\n", greeting + b"\x04\xff" * 99, b""):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(words)


async def check_adapter(llm, adapter, request_id):
    """It makes of a prompt what PEFT makes of the golden's."""
    [line, *_] = (await output_of(llm, request_id, logprobs=8, lora_request=adapter)).logprobs
    top = json.loads((GOLDEN / "plain" / "logits.json").read_text())["top"][str(len(prompt_of(NAME)) - 1)]
    found = [line[token].logprob - line[top["ids"][0]].logprob for token in top["ids"]]
    assert found == pytest.approx([logit - top["logits"][0] for logit in top["logits"]], abs=5e-4)


async def live_with_adapters(llm, others, folder):
    """There is one place in slots and in host memory, so two adapters are read again and again."""
    plain, other = LoRARequest("plain", 1, str(GOLDEN / "plain")), LoRARequest("other", 2, write_other(folder, "plain"))
    wanted, beside = golden_of(NAME)["greedy"][:COUNT], answer(llm, "other", lora_request=other)
    checks = [check_adapter(llm, plain, f"plain {i}") for i in range(2)]
    without, with_other, *_ = await asyncio.gather(answer(llm, "none"), beside, *checks)
    assert without == wanted != with_other
    # What one process cannot read, none has.
    driver = core(others)
    [follower] = followers(driver)
    for rank, reader in enumerate((follower, driver)):
        path = folder / f"not for {rank}"
        path.symlink_to(f"/proc/self/task/{reader}/root{folder}")
        with pytest.raises(CheckpointError, match=rf"^rank {rank}\b.*: there is no folder {path}"):
            await llm.add_lora(LoRARequest("third", 3, str(path)))
    for file in (GOLDEN / "plain").iterdir():
        shutil.copy(file, folder)
    await check_adapter(llm, msgspec.structs.replace(other, load_inplace=True), "in place")
    assert await llm.list_loras() == {1, 2} and await llm.remove_lora(2) and await llm.pin_lora(1)
    await check_adapter(llm, plain, "pinned")
    return plain


async def live(tmp_path, llm, others):
    wanted = golden_of(NAME)["greedy"][:COUNT]
    assert await asyncio.gather(*(answer(llm, f"first {i}") for i in range(3))) == [wanted] * 3
    assert (await llm.executor_stats())["num_processes"] == 2
    ports = ports_of([core(others), *followers(core(others))])
    assert len(ports) >= 3, "jax's service, commands, reports"
    for port in ports:
        say_garbage(port)
    assert await answer(llm, "undisturbed") == wanted
    adapter = await live_with_adapters(llm, others, tmp_path / "other")
    await llm.sleep(level=1)
    await llm.wake_up()
    assert await answer(llm, "awake", logprobs=2) == wanted
    await check_adapter(llm, adapter, "awake with it")
    # One of them dies while a request is under way: that one ends with an error, and the next is answered.
    first = core(others)
    [follower] = followers(first)
    os.kill(follower, signal.SIGSTOP)  # so that it is under way for certain
    under_way = asyncio.create_task(answer(llm, "doomed"))
    await asyncio.sleep(0.5)
    os.kill(follower, signal.SIGKILL)
    with pytest.raises(EngineRestartError, match="rank 1: its process|rank 1 .* no sign of life"):
        await under_way
    while llm.errored:
        await asyncio.sleep(0.1)
    assert await answer(llm, "after") == wanted
    await check_adapter(llm, adapter, "after with it")
    assert core(others) != first and await llm.list_loras() == {1}
    return all_below(core(others))


async def live_with_a_driver_that_stops(llm, others):
    wanted = golden_of(NAME)["greedy"][:COUNT]
    assert await answer(llm, "first") == wanted
    first = core(others)
    behind = followers(first)
    under_way = [asyncio.create_task(answer(llm, f"doomed {i}")) for i in range(4)]
    await asyncio.sleep(0.01)
    os.kill(first, signal.SIGSTOP)
    deadline = time.monotonic() + SILENCE_SECONDS + 15
    while any(map(command, behind)):
        assert time.monotonic() < deadline, "those who follow wait for ever"
        await asyncio.sleep(0.1)
    for each in under_way:
        with pytest.raises(EngineRestartError, match="counts as hung"):
            await each
    while llm.errored:
        await asyncio.sleep(0.1)
    assert await answer(llm, "after") == wanted
    return [first, *behind, *all_below(core(others))]


async def live_with_two_cores(llm, others):
    wanted = golden_of(NAME)["greedy"][:COUNT]
    both = (answer(llm, f"of core {number}", data_parallel_rank=number) for number in (0, 1))
    assert await asyncio.gather(*both) == [wanted] * 2
    assert (await llm.executor_stats())["num_processes"] == 4
    new = [pid for pid in children(os.getpid()) if pid not in others]
    assert [len(followers(pid)) for pid in new if followers(pid)] == [1, 1]
    return [below for pid in new for below in (pid, *all_below(pid))]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_two_processes_answer_as_one(tmp_path, monkeypatch, backend):
    check_group(tmp_path, monkeypatch, backend, partial(live, tmp_path), enable_lora=True)


@pytest.mark.slow
def test_two_cores_of_two_processes_each_answer_alike(tmp_path, monkeypatch):
    check_group(tmp_path, monkeypatch, "mp", live_with_two_cores, data_parallel_size=2)


@pytest.mark.exhaustive
def test_who_follows_a_driver_that_stops_in_mid_step_ends_and_the_group_starts_again(tmp_path, monkeypatch):
    check_group(tmp_path, monkeypatch, "mp", live_with_a_driver_that_stops, step_timeout=SILENCE_SECONDS + 5)


def check_group(tmp_path, monkeypatch, backend, main, step_timeout=300.0, **options):
    """Two processes of each core do what `main` says, and nothing is left of those whose ids it returns."""
    folder = write_checkpoint(NAME, tmp_path / "model")
    options |= {"tensor_parallel_size": 2, "distributed_executor_backend": backend}
    if backend == "ray":  # two virtual devices for each of two processes
        pytest.importorskip("ray", reason="the extra ray is not installed")
        options |= {"tensor_parallel_size": 4, "nnodes": 2, "master_port": free_port_of_three()}
        monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    config = EngineConfig.from_options(model=folder, **options, **OPTIONS)
    others = children(os.getpid())
    llm = AsyncLLM.from_config(config, step_timeout=step_timeout)
    try:
        last = asyncio.run(main(llm, others))
    finally:
        llm.shutdown()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in last):
        left = [pid for pid in last if Path(f"/proc/{pid}").exists()]
        assert time.monotonic() < deadline, f"processes {left} were left behind"
        time.sleep(0.05)
