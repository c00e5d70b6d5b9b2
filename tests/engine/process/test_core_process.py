"""What happens in a core's process between loading and serving."""

import gc
import os
from types import SimpleNamespace

from jaxpaged.engine.process import core_process, wire


def make_core(config, reports):
    reports.announce(wire.CoreFacts(config.options(), 8, "", ""))
    return SimpleNamespace(shutdown=lambda: None)


def test_what_was_loaded_is_nothing_that_the_garbage_collector_looks_at(monkeypatch, tmp_path):
    loaded, seen = [[number] for number in range(1000)], []

    def server(*args):
        seen.extend(gc.get_objects())
        return SimpleNamespace(run=lambda: None, close=lambda: None)

    monkeypatch.setattr(core_process, "CoreServer", server)
    reader, writer = os.pipe()
    start = wire.Start({}, f"{__name__}:make_core", str(tmp_path), 0, "text")
    try:
        core_process.serve(start, tmp_path, core_process.StatusPipe(writer), SimpleNamespace(hold=lambda server: None))
    finally:
        os.close(reader)
        os.close(writer)
    looked_at = set(map(id, seen))
    assert not any(id(each) in looked_at for each in loaded)
