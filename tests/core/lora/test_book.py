"""Versions of adapters, and which of them are in host memory."""

import msgspec
import pytest

from jaxpaged.errors import RequestError, UsageError
from jaxpaged.messages import LoRARequest
from tests.core.lora.test_slots import ENDLESS, A, B, C, engine_of, names
from tests.core.simulation import adapter, expected_output, prompt_of


def on_host(engine) -> set[str]:
    return set(engine.files.host.values())


def run_one(engine, name: str, info, **options) -> None:
    engine.add(name, prompt_of(9), lora=info, **{"max_tokens": 2, **options})
    engine.run()


def test_the_adapter_that_was_used_last_longest_ago_leaves_host_memory():
    engine = engine_of(A, B, max_cpu_loras=2)
    run_one(engine, "a", A)
    engine.load(C)
    run_one(engine, "a again", A)
    assert on_host(engine) == {"of a", "of c"}
    assert engine.adapters.pin(1)
    run_one(engine, "b", B)
    run_one(engine, "c", C)
    assert on_host(engine) == {"of a", "of c"} and engine.files.num_reads == 2
    stats = engine.scheduler.make_stats().lora
    assert (stats.num_host_hits, stats.num_host_misses, stats.num_host_evictions) == (2, 2, 3)
    assert [info.lora_name for info in engine.adapters.infos()] == ["a", "b", "c"]


def test_requests_wait_for_their_adapter_while_others_go_on():
    engine = engine_of(C, A, B, max_loras=2, max_cpu_loras=2)
    engine.files.late = True
    engine.add("a", prompt_of(5), lora=A, max_tokens=3, **ENDLESS)
    engine.add("gone", prompt_of(3, 1), lora=A, max_tokens=3, **ENDLESS)
    engine.add("b", prompt_of(5), lora=B, max_tokens=3, **ENDLESS)
    assert "of c" not in on_host(engine)
    engine.add("c", prompt_of(5), lora=C, max_tokens=3, **ENDLESS)
    engine.step()
    assert names(engine.scheduler.running) == ["a", "gone", "b"]
    engine.step()
    assert engine.files.reading, "the adapter is not read beside the steps"
    engine.abort("gone", "c")
    engine.add("c", prompt_of(5), lora=C, max_tokens=3, **ENDLESS)
    while engine.scheduler.running:
        engine.step()
    assert names(engine.scheduler.waiting) == ["c"] and engine.files.num_reads == 1
    engine.files.end_read()
    engine.run()


@pytest.mark.parametrize(
    ("files", "reason"),
    [({}, "cannot be read: /adapters/b has no adapter."), ({"/adapters/b": "x"}, "have changed since it was loaded")],
)
def test_what_is_not_there_any_more_fails_its_requests_only(files, reason):
    engine = engine_of(B, A, max_cpu_loras=1)
    engine.add("base", prompt_of(5), max_tokens=5, **ENDLESS)
    engine.files.files = files
    for name in ("b", "b too"):
        engine.add(name, prompt_of(5), lora=B)
    engine.step()
    engine.step()
    ends = [engine.ends[name] for name in ("b", "b too")]
    assert all(end.finish_reason == "error" and reason in end.error for end in ends)
    assert ends[0].error_parameter == "lora_request"
    engine.run()
    assert "x" not in on_host(engine)
    engine.files.files = {"/adapters/b": "of b"}
    run_one(engine, "b", B)


def test_requests_of_an_adapter_that_is_removed_finish_and_then_it_is_dropped():
    engine = engine_of(A, B)
    engine.add("a", prompt_of(5), lora=A, max_tokens=9, **ENDLESS)
    engine.step()
    engine.add("waits", prompt_of(5), lora=B, max_tokens=2, **ENDLESS)
    assert engine.adapters.remove(1) and engine.adapters.remove(2)
    assert not engine.adapters.remove(1)
    for info in (A, B):
        with pytest.raises(RequestError, match="not loaded, or no more"):
            engine.add("late", prompt_of(5), lora=info)
    assert engine.adapters.infos() == [] and on_host(engine) == {"of a", "of b"}
    engine.run()
    assert not on_host(engine) and not engine.adapters.slots.holders
    engine.load(A)
    run_one(engine, "a", A)


def test_an_adapter_that_is_removed_and_loaded_again_goes_on():
    engine = engine_of(A)
    engine.add("a", prompt_of(5), lora=A, max_tokens=9, **ENDLESS)
    engine.step()
    engine.adapters.remove(1)
    engine.load(A)
    engine.add("a too", prompt_of(5), lora=A, max_tokens=9, **ENDLESS)
    engine.step()
    assert names(engine.scheduler.running) == ["a", "a too"] and len(engine.files.host) == 1
    engine.run()
    assert on_host(engine) == {"of a"}


def test_new_requests_get_the_new_version_and_old_ones_keep_theirs():
    engine = engine_of(A, max_loras=2, max_cpu_loras=2, num_blocks=12, max_model_len=30)
    new = msgspec.structs.replace(A, digest="new")
    for i in range(2):
        engine.add(f"old{i}", prompt_of(9), lora=A, max_tokens=12, **ENDLESS)
    engine.step()
    engine.load(new)
    assert engine.adapters.infos() == [new]
    engine.add("new", prompt_of(9), lora=new, max_tokens=12, **ENDLESS)
    engine.load(B)  # for which there is no place until the old version is gone
    engine.step()
    assert {each.adapter.slot for each in engine.scheduler.running} == {1, 2}
    assert on_host(engine) == {"of a", "new"}
    engine.run()
    assert engine.scheduler.make_stats().num_preemptions, "the test is too easy"
    assert on_host(engine) == {"new"}
    before = engine.scheduler.make_stats().prefix_cache_hits
    run_one(engine, "again", new)
    assert engine.scheduler.make_stats().prefix_cache_hits == before + 8
    engine.add("late", prompt_of(9), lora=A)  # it was on its way when the adapter was loaded anew
    assert engine.requests["late"].lora == new
    engine.run()
    assert engine.tokens["late"] == expected_output(engine.requests["late"], 30)[0]


def test_the_same_content_is_no_new_version():
    engine = engine_of(A, max_cpu_loras=1)
    engine.add("a", prompt_of(5), lora=A, max_tokens=9, **ENDLESS)
    engine.step()
    engine.load(A)
    engine.load(A)
    engine.add("a too", prompt_of(5), lora=A, max_tokens=9, **ENDLESS)
    engine.step()
    assert names(engine.scheduler.running) == ["a", "a too"] and len(engine.files.host) == 1
    engine.run()
    assert engine.scheduler.make_stats().lora.num_loads == 1


def test_pinned_adapters_leave_no_place():
    engine = engine_of(A, B, max_cpu_loras=1)
    assert engine.adapters.pin(1) and engine.adapters.pin(1) and not engine.adapters.pin(7)
    with pytest.raises(UsageError, match="max_cpu_loras = 1 LoRA adapters, and all of them are pinned.*'b' cannot"):
        engine.adapters.pin(2)
    run_one(engine, "a", A)
    engine.add("b", prompt_of(5), lora=B)
    engine.step()
    assert "all of them are pinned. Raise it, or remove one." in engine.ends["b"].error
    engine.adapters.remove(1)
    run_one(engine, "b again", B)


def test_what_is_known_of_an_adapter_that_is_to_be_loaded():
    book = engine_of(A).adapters
    book.infos()  # takes what came
    known = lambda **fields: book.check_new(LoRARequest(**{"lora_name": "a", "lora_int_id": 1, **fields}))
    assert known() == known(lora_path="/adapters/a") == A
    assert known(lora_path="/elsewhere") is None and known(load_inplace=True) is None
    assert known(lora_name="z", lora_int_id=9) is None
    with pytest.raises(RequestError, match="1 is that of the adapter 'a', and 'z' cannot have it, too"):
        known(lora_name="z")


def test_a_catalogue_that_is_given_back_is_read_when_it_is_needed():
    engine = engine_of(max_cpu_loras=1)
    engine.files.files = {"/adapters/a": "of a", "/adapters/b": "other"}
    engine.adapters.restore([A, B])
    engine.adapters.restore([adapter("z", number=1)])  # there is one
    assert engine.adapters.infos() == [A, B] and not on_host(engine)
    engine.add("b", prompt_of(5), lora=B)
    run_one(engine, "a", A)
    assert "changed" in engine.ends["b"].error


def test_waiting_ends_when_something_is_read():
    engine = engine_of(A, B, max_cpu_loras=1)
    engine.files.late = True
    engine.add("a", prompt_of(5), lora=A)
    assert not engine.adapters.wait(60)
    engine.dispatch()
    assert engine.adapters.wait(0.01)
    engine.files.end_read()
    assert engine.adapters.wait(60)
    engine.run()
    assert not engine.adapters.wait(60)
