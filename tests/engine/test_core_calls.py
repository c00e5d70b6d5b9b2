"""Calls of an engine core: they arrive as they were sent, and every one has its method."""

import inspect

import msgspec
import pytest

from jaxpaged.encoding.frames import FrameDecoder, FrameEncoder
from jaxpaged.engine.adapter_desk import AdapterDesk
from jaxpaged.engine.control import AsyncEngineControl, EngineControl
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.core_calls import (
    CALLS,
    AddLora,
    AdoptWeights,
    CallExtension,
    CollectiveRpc,
    KeepLease,
    LoadPrefix,
    PinLora,
    RemoveLora,
    RestoreLoras,
    SavePrefix,
    Sleep,
    Snapshot,
    StartProfile,
    UpdateWeights,
    WakeUp,
    call_named,
)
from jaxpaged.engine.process import wire
from jaxpaged.engine.weight_updates import WeightUpdates
from jaxpaged.errors import UsageError
from jaxpaged.messages import LoRAInfo, LoRARequest

KEEP = KeepLease({"do_remote_prefill": True, "remote_port": 1}, is_needed=False)
ABOUT_SOMETHING = {
    AddLora: AddLora(LoRARequest("a", 3, "/adapters/a", "base", load_inplace=True)),
    CallExtension: CallExtension("norm", [1, "a"], {"b": [2.5]}),
    PinLora: PinLora(3),
    RemoveLora: RemoveLora(3),
    UpdateWeights: UpdateWeights(["step_1.safetensors"]),
    RestoreLoras: RestoreLoras([LoRAInfo("a", 3, "/adapters/a", "of a", rank=8)]),
}
"""Calls that have no arguments by default."""
SPECIAL = [Sleep(2, "keep"), WakeUp(["weights"]), Snapshot(5), StartProfile("folder"), KEEP]


@pytest.mark.parametrize(
    "call", [*(ABOUT_SOMETHING.get(call) or call() for call in CALLS.values()), *SPECIAL], ids=repr
)
def test_a_call_arrives_as_it_was_sent(call):
    frames = FrameEncoder().encode(wire.Call(3, call.name(), msgspec.structs.asdict(call)))
    arrived = FrameDecoder(wire.Call).decode(frames)
    assert arrived.call_id == 3
    assert call_named(arrived.name, arrived.arguments) == call


NOT_FOR_USERS = {"keep_lease", "restore_loras", "check_weight_update", "take_weights_back"}


@pytest.mark.parametrize("control", [EngineControl, AsyncEngineControl])
@pytest.mark.parametrize("name", sorted(CALLS.keys() - NOT_FOR_USERS))
def test_every_call_has_a_method_with_its_arguments(control, name):
    arguments = list(inspect.signature(getattr(control, name)).parameters)[1:]
    if control is EngineControl and name == "update_weights":  # it may be a whole update
        arguments = [each for each in arguments if each not in ("version", "donate")]
    assert arguments == [field.name for field in msgspec.structs.fields(CALLS[name])]


@pytest.mark.parametrize(
    "call", [*CALLS.values(), AdoptWeights, CollectiveRpc, LoadPrefix, SavePrefix], ids=lambda call: call.name()
)
def test_every_call_is_a_method_of_the_core_with_its_arguments(call):
    owner = {"": EngineCore, "adapters": AdapterDesk, "weights": WeightUpdates}[call.desk]
    arguments = list(inspect.signature(getattr(owner, call.name())).parameters)[1:]
    assert arguments == [field.name for field in msgspec.structs.fields(call)]


def test_functions_are_not_sent():
    assert CollectiveRpc not in CALLS.values()
    with pytest.raises(UsageError, match="no answer to 'collective_rpc'"):
        call_named("collective_rpc", {"method": "stats"})


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("sleep", {"level": "2"}, "Expected `int`"),
        ("sleep", {"depth": 1}, "unknown field `depth`"),
        ("wake_up", {"tags": 5}, "Expected `array | null`"),
        ("shutdown", {}, "no answer"),
    ],
)
def test_what_cannot_be_is_a_usage_error_that_says_why(name, arguments, problem):
    with pytest.raises(UsageError, match=problem.replace("|", r"\|")):
        call_named(name, arguments)
