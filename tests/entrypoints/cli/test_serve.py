"""`jaxpaged serve`: flags, and how engine and server are put together."""

import asyncio
import json
import logging
import re
import sys
import weakref

import pytest

from jaxpaged import errors
from jaxpaged.entrypoints.cli import main
from jaxpaged.entrypoints.cli import serve as serve_command
from jaxpaged.errors import CapacityError

pytest.importorskip("starlette", reason="needs the extra serve")

from jaxpaged.entrypoints.http import server
from jaxpaged.entrypoints.http.transport.listener import bind
from tests.entrypoints.http.async_engine import FakeAsyncEngine


@pytest.fixture
def served(monkeypatch, capsys):
    """`served("serve", ...)`: (exit status, service or None, keys, engine options, what was printed)."""

    def run(*arguments, fail=None, cold=False):
        seen = {"options": None, "service": None, "keys": None, "shut_down": False, "sockets": []}

        class Engine(FakeAsyncEngine):
            def shutdown(self):
                seen["shut_down"] = True

        def open_engine(options, progress, step_timeout, max_restarts):
            seen.update(options=dict(options), supervision=(step_timeout, max_restarts))
            if fail is not None:
                raise fail
            return Engine(model=options.get("model", "demo"))

        async def serve(service, sockets, keys, grpc_admin_keys, *, on_listening):
            seen.update(service=service, keys=list(keys), grpc_admin_keys=list(grpc_admin_keys))
            service.engine.cold = cold
            on_listening()
            await asyncio.sleep(0.05)
            service.engine.cold = False
            await asyncio.sleep(0.05)

        monkeypatch.setattr(serve_command, "open_async_engine", open_engine)

        def bound(*address):
            seen["sockets"].append(bind(*address))
            return seen["sockets"][-1]

        monkeypatch.setattr(server, "serve", serve)
        monkeypatch.setattr(server, "bind", bound)
        try:
            status = main(["serve", "--port", "0", *arguments])
        except SystemExit as end:
            status = end.code
        assert all(each.fileno() == -1 for each in seen["sockets"]), "a socket is still open"
        return status, seen, capsys.readouterr().err

    return run


def test_the_embedded_model_is_served_on_this_machine_by_default(served):
    status, seen, err = served()
    assert status == 0 and seen["options"] == {} and seen["keys"] == [] and seen["shut_down"]
    assert seen["service"].model.names == ("demo",)
    assert "demo is served at http://127.0.0.1:" in err and "no API key" in err
    assert re.search(r"^demo is ready, \d+\.\d s after the start\.$", err.splitlines()[-1])


def test_what_a_server_waits_for_is_told_until_it_is_ready(served, monkeypatch):
    monkeypatch.setattr(serve_command, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(serve_command, "LOOK_SECONDS", 0.01)
    _, _, err = served(cold=True)
    lines = err.splitlines()
    waits = [line for line in lines if "not ready yet: 3 of the 7 programs that ordinary requests need" in line]
    assert waits and lines.index(waits[0]) > lines.index(next(line for line in lines if "is served at" in line))
    assert "is ready, " in lines[-1]
    _, _, err = served("--ready-when", "serving", cold=True)
    assert "not ready yet" not in err and "is ready, " in err


def test_with_json_what_a_server_waits_for_is_json_too(served, monkeypatch):
    monkeypatch.setattr(serve_command, "LOG_SECONDS", 0.0)
    _, _, err = served("--log-format", "json", cold=True)
    said = [json.loads(line)["message"] for line in err.splitlines()]
    assert any("not ready yet" in line for line in said)


def test_engine_flags_reach_the_engine_and_server_flags_the_server(served):
    _, seen, err = served(
        "org/tiny",
        "--max-num-seqs",
        "3",
        "--api-key",
        "a,b",
        "--served-model-name",
        "x,y",
        "--shutdown-timeout",
        "2.5",
        "--step-timeout",
        "7",
        "--max-restarts",
        "1",
        "--ready-when",
        "serving",
    )
    assert seen["options"] == {"model": "org/tiny", "max_num_seqs": 3} and seen["keys"] == ["a", "b"]
    options = seen["service"].options
    assert seen["supervision"] == (7.0, 1) and options.ready_when == "serving"
    assert options.shutdown_timeout == 2.5 and seen["service"].model.names == ("x", "y")
    assert "an API key is needed" in err


def test_grpc_has_an_address_and_admin_keys_of_its_own(served, tmp_path):
    for module in ("grpc", "grpc_health", "grpc_reflection"):
        pytest.importorskip(module, reason="needs the extra grpc")
    (tmp_path / "keys").write_text("operator\n")
    _, seen, err = served("--grpc-port", "0", "--grpc-admin-key-file", str(tmp_path / "keys"))
    assert seen["grpc_admin_keys"] == ["operator"] and "http://127.0.0.1:" in err and "over gRPC at 127.0.0.1:" in err
    status, seen, err = served("--no-http", "--grpc-port", "0")
    assert status == 0 and "http://" not in err and "demo is served over gRPC at 127.0.0.1:" in err
    status, _, err = served("--no-http")
    assert status == 2 and "--grpc-port" in err


@pytest.mark.parametrize(
    ("arguments", "level"), [([], "INFO"), (["--log-level", "warning"], "WARNING"), (["--debug"], "DEBUG")]
)
def test_the_log_has_the_level_that_was_asked_for(served, arguments, level):
    assert served(*arguments)[0] == 0
    assert logging.getLevelName(logging.getLogger("jaxpaged").level) == level


def test_with_json_standard_error_holds_nothing_else(served):
    status, seen, err = served("--log-format", "json", "--no-access-log")
    events = [json.loads(line) for line in err.splitlines()]
    assert status == 0 and "demo is served at http://127.0.0.1:" in events[0]["message"]
    assert not seen["service"].options.access_log


def test_two_models_are_refused(served):
    status, _, err = served("one", "--model", "two")
    assert status == 2 and "two models" in err


@pytest.mark.parametrize("arguments", [["--port", "99999"], ["--max-body-bytes", "0"], ["--api-key-file", "/no/file"]])
def test_wrong_options_are_found_before_anything_is_loaded(served, arguments):
    status, seen, err = served(*arguments)
    assert status == 2 and seen["options"] is None and "error" in err


def test_an_engine_that_does_not_start_is_one_line_and_an_exit_status(served):
    status, seen, err = served(fail=CapacityError("the weights need 5 GiB. Use another device."))
    assert status == 1 and err.count("\n") == 1 and "5 GiB" in err and seen["service"] is None


def test_missing_libraries_are_named_with_the_extra_that_brings_them(served, monkeypatch):
    found = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    status, _, err = served()
    assert status == 2 and "uvicorn" in err and "pip install -e '.[serve]'" in err


def test_the_loop_never_waits_long_for_its_turn_and_what_was_set_for_it_is_set_back():
    async def turn():
        return sys.getswitchinterval()

    before = sys.getswitchinterval()
    assert serve_command.run_loop(turn()) == pytest.approx(serve_command.TURN_SECONDS) and before > 0.004
    assert sys.getswitchinterval() == before


def test_what_holds_itself_is_collected_while_a_server_runs(monkeypatch):
    """As grpcio leaves it with every call."""
    monkeypatch.setattr(serve_command, "COLLECT_SECONDS", 0.02)

    class Cycle:
        pass

    async def leave_one():
        cycle = Cycle()
        cycle.itself = cycle
        seen = weakref.ref(cycle)
        del cycle
        for _ in range(100):
            await asyncio.sleep(0.02)
            if seen() is None:
                return True
        return False

    assert serve_command.run_loop(leave_one())
