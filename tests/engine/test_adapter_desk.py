"""Adapters through an engine core: read beside its steps, and with the tokens of the right one for each request."""

import threading
from dataclasses import replace

import msgspec
import pytest

from jaxpaged.config.lora import LoRAConfig
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.core_calls import AddLora, ListLoras, PinLora, RemoveLora, RestoreLoras
from jaxpaged.errors import CheckpointError, RequestError, UsageError
from jaxpaged.messages import LoRARequest
from tests.engine.fake_engine import FakeExecutor, counting_model, make_config
from tests.engine.test_core import VOCAB, request, run


def make(max_loras=1, max_cpu_loras=None, **options):
    """A core whose adapters add 1 to every token, 2, 3."""
    executor = FakeExecutor(counting_model(VOCAB), VOCAB)
    executor.files = {f"/{name}": change for change, name in enumerate("abc", 1)}
    lora = LoRAConfig(enable_lora=True, max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    return EngineCore(replace(make_config(**options), lora=lora), executor), executor


def load(core, name, **fields):
    return core.call(AddLora(LoRARequest(name, "abc".index(name) + 1, f"/{name}", **fields)))


def named(name, info=None, **options):
    message = request(name, **options)
    message.lora = info
    return message


def tokens_with(change, first=10, count=4):
    return [first + (1 + change) * i for i in range(1, count + 1)]


def test_each_request_has_the_tokens_of_its_adapter():
    core, executor = make()
    infos = [load(core, name) for name in "abc"]
    assert core.call(ListLoras()) == infos and [info.digest for info in infos] == ["adds 1", "adds 2", "adds 3"]
    for i, info in enumerate([None, *infos]):
        for again in range(2):
            core.add_request(named(f"{i} {again}", info, prompt=(10, 20 + i, 10)))
    tokens, _ = run(core)
    assert tokens == {f"{i} {again}": tokens_with(i) for i in range(4) for again in range(2)}
    stats = core.stats().lora
    assert (stats.num_loads, stats.num_host_misses, len(executor.host)) == (3, 4, 1)
    assert core.call(RemoveLora(1)) and not core.call(RemoveLora(1))
    assert core.call(ListLoras()) == infos[1:]
    with pytest.raises(RequestError, match="'a' of request 'late' is not loaded, or no more"):
        core.add_request(named("late", infos[0]))
    core.shutdown()


def test_steps_go_on_while_an_adapter_is_read():
    core, executor = make(max_loras=2, max_cpu_loras=2)
    a, b, _ = (load(core, name) for name in "abc")  # there is no place for a any more
    executor.may_read.clear()
    core.add_request(named("base", max_tokens=8))
    core.add_request(named("b", b))
    core.add_request(named("a", a))
    core.add_request(named("gone", a))
    reader = threading.Thread(target=load, args=(core, "c"), kwargs={"load_inplace": True})
    reader.start()
    core.abort_requests(["gone"])
    tokens, ends = {}, set()
    while not {"base", "b"} <= ends:
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            ends |= {output.request_id} if output.finish_reason else set()
    assert tokens["b"] == tokens_with(2) and "a" not in tokens
    executor.may_read.set()
    reader.join()
    assert run(core)[0] == {"a": tokens_with(1)}
    core.shutdown()


def test_adapters_that_are_gone_or_others_fail_their_requests_only():
    core, executor = make()
    a, b, c = (load(core, name) for name in "abc")
    executor.files = {"/b": 7, "/c": 3}
    for name, info in (("a", a), ("b", b), ("c", c), ("base", None)):
        core.add_request(named(name, info))
    _, ends = run(core)
    assert ends.pop("c") == ends.pop("base") == ("length", None)
    assert "'a' cannot be read: /a has no adapter_config.json" in ends["a"][1]
    assert "'b' in /b have changed since it was loaded. Load it anew" in ends["b"][1]
    with pytest.raises(CheckpointError, match="/a has no adapter_config.json"):
        load(core, "a", load_inplace=True)
    b = load(core, "b", load_inplace=True)
    core.add_request(named("b", b))
    assert run(core)[0] == {"b": tokens_with(7)}
    core.shutdown()


def test_running_requests_keep_the_version_they_began_with():
    core, executor = make(max_loras=2)
    old = load(core, "a")
    core.add_request(named("old", old, prompt=(10,) * 9, max_tokens=9))
    core.step()
    executor.files["/a"] = 4
    assert load(core, "a") == old, "it is read once"
    new = load(core, "a", load_inplace=True)
    core.add_request(named("new", new, prompt=(10,) * 9))
    tokens, _ = run(core)
    assert tokens["new"] == tokens_with(4) and tokens["old"] == tokens_with(1, count=9)[1:]
    assert list(executor.host.values()) == [4]
    core.shutdown()


@pytest.mark.parametrize("level", [1, 2])
def test_slots_are_loaded_anew_after_sleep(level):
    core, _ = make(max_loras=2, max_cpu_loras=2)
    a, b = load(core, "a"), load(core, "b")
    for name, info in (("a", a), ("b", b)):
        core.add_request(named(name, info, max_tokens=6))
    said = [output for _ in range(2) for output in core.step().outputs]
    core.sleep(level, "keep")
    core.wake_up()
    tokens, _ = run(core)
    for output in said[::-1]:
        tokens[output.request_id] = output.new_token_ids + tokens[output.request_id]
    assert tokens == {"a": tokens_with(1, count=6), "b": tokens_with(2, count=6)}
    assert core.stats().lora.num_loads == 4
    core.shutdown()


def test_slots_are_loaded_anew_after_a_step_has_failed():
    core, executor = make(max_loras=1, max_num_seqs=1)
    a = load(core, "a")
    executor.fail_at = {1: "result"}
    core.add_request(named("fails", a))
    core.add_request(named("waits", a))
    tokens, ends = run(core)
    assert ends["fails"][0] == "error" and tokens["waits"] == tokens_with(1)
    assert executor.recoveries == 1 and core.stats().lora.num_loads == 2
    core.shutdown()


def test_a_catalogue_comes_back_with_what_is_pinned():
    core, _ = make()
    infos = [load(core, name) for name in "ab"]
    assert core.call(PinLora(1)) and not core.call(PinLora(3))
    with pytest.raises(UsageError, match="all of them are pinned"):
        core.call(PinLora(2))
    other, _ = make()
    other.call(RestoreLoras(infos))
    assert other.call(PinLora(1)) and other.call(ListLoras()) == infos
    for info in infos:
        other.add_request(named(info.lora_name, info))
    tokens, ends = run(other)
    assert tokens["a"] == tokens_with(1) and "all of them are pinned" in ends["b"][1]
    for each in (core, other):
        each.shutdown()


def test_an_engine_without_adapters_says_so():
    core, info = EngineCore(make_config(), FakeExecutor(counting_model(VOCAB), VOCAB)), load(make()[0], "a")
    for call in (AddLora(LoRARequest("a", 1, "/a")), RemoveLora(1), PinLora(1), ListLoras(), RestoreLoras([info])):
        with pytest.raises(UsageError, match="takes no LoRA adapters. Set enable_lora"):
            core.call(call)
    with pytest.raises(RequestError, match="this engine takes none. Set enable_lora"):
        core.add_request(named("r", msgspec.structs.replace(info)))
    assert core.stats().lora is None
