import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from jaxpaged.errors import CheckpointError, EngineDeadError, RequestError
from jaxpaged.multimodal.decoding import PictureLimits
from jaxpaged.multimodal.identity import picture_key, source_digest
from jaxpaged.multimodal.processes import PictureProcesses, ProcessLimits
from jaxpaged.multimodal.processors import processor_of
from tests.multimodal.drawn import drawn, encoded
from tests.processes_and_threads import left_of, running

FIELD = "messages[0].content[0].image_url"
CONFIG = {"model_type": "gemma3", "mm_tokens_per_image": 16}
SETTINGS = {"size": {"height": 112, "width": 112}}


@pytest.fixture
def opened():
    made = []
    before = running()

    def make(**options):
        made.append(PictureProcesses("m", CONFIG, SETTINGS, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert not left_of(before)


def check(processes: PictureProcesses, seed: int = 0):
    image = drawn(90, 60, seed)
    ours = processor_of(CONFIG, SETTINGS)
    expected = ours.process(np.asarray(image), FIELD)
    for source in (encoded(image), np.asarray(image)):
        found = processes.process(source, FIELD)
        assert np.array_equal(found.pixels, expected.pixels) and found.layout == expected.layout
        assert found.key == picture_key("m", "image", ours.options, expected.layout, source_digest(source))


def refusal(processes, picture, **options) -> RequestError:
    with pytest.raises(RequestError) as caught:
        processes.process(picture, FIELD, **options)
    return caught.value


def only_child(processes: PictureProcesses) -> int:
    (child,) = processes._children  # this process may have others: engines of other tests
    return child.pid


def test_a_child_gives_what_this_process_would_give_and_serves_many(opened):
    processes = opened(num_processes=2)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda seed: check(processes, seed), range(12)))
    assert len(processes._children) <= 2


def test_errors_name_the_field_and_leave_the_child_alive(opened):
    processes = opened(num_processes=1, limits=PictureLimits(max_pixels=10_000))
    check(processes)
    pid = only_child(processes)
    error = refusal(processes, b"no picture")
    assert error.parameter == FIELD and "no picture that can be read" in str(error)
    assert "are allowed" in str(refusal(processes, encoded(drawn(200, 200))))
    assert "uint8" in str(refusal(processes, np.zeros((4, 4, 3), np.float32)))
    assert "it has none" in str(refusal(processes, np.zeros((0, 4, 3), np.uint8)))
    error = refusal(processes, encoded(drawn(9, 9)), options={"do_pan_and_scan": 7})
    assert error.parameter == "mm_processor_kwargs" and "do_pan_and_scan is 7" in str(error)
    check(processes)
    assert only_child(processes) == pid


def test_options_of_a_request_reach_the_child(opened):
    scan = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
    processes = opened(num_processes=1)
    found = processes.process(encoded(drawn(200, 60)), FIELD, scan)
    expected = processor_of(CONFIG, {**SETTINGS, **scan}).process(np.asarray(drawn(200, 60)), FIELD)
    assert np.array_equal(found.pixels, expected.pixels) and found.layout == expected.layout


def test_a_child_gives_way_to_the_server_and_is_a_session_of_its_own(opened):
    processes = opened(num_processes=1)
    check(processes)
    pid, own = only_child(processes), os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(own + 10, 19)
    assert os.getsid(pid) == pid


def test_a_child_that_is_killed_costs_its_request_and_is_replaced(opened):
    processes = opened(num_processes=1)
    check(processes)
    pid = only_child(processes)
    os.kill(pid, signal.SIGSTOP)  # so that it is busy for certain
    timer = threading.Timer(0.2, os.kill, [pid, signal.SIGKILL])
    timer.start()
    error = refusal(processes, encoded(drawn(90, 60)))
    timer.join()
    assert error.parameter == FIELD and "memory and time" in str(error)
    check(processes)
    assert only_child(processes) != pid


def test_a_child_that_was_killed_while_it_had_nothing_to_do_costs_nobody(opened):
    processes = opened(num_processes=1)
    check(processes)
    pid = only_child(processes)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    check(processes)
    assert only_child(processes) != pid


@pytest.mark.parametrize("size", [(90, 60), (2000, 1000)])
def test_a_child_that_hangs_is_replaced_whether_it_reads_or_not(opened, size):
    processes = opened(num_processes=1)
    check(processes)
    pid = only_child(processes)
    os.kill(pid, signal.SIGSTOP)
    processes._idle[0]._patience = 0.1
    assert "memory and time" in str(refusal(processes, np.zeros((*size, 3), np.uint8)))
    check(processes)
    assert only_child(processes) != pid


def test_a_picture_that_needs_too_much_memory_costs_its_request(opened):
    processes = opened(num_processes=1, process_limits=ProcessLimits(memory_bytes=700 << 20))
    check(processes)
    large = encoded(Image.new("RGBA", (6000, 6000)), compress_level=1)
    error = refusal(processes, large)
    assert error.parameter == FIELD and "memory" in str(error)
    check(processes)


def test_a_picture_that_takes_too_long_costs_its_request(opened):
    large = encoded(Image.new("RGB", (6000, 6000)), compress_level=1)
    processes = opened(num_processes=1, process_limits=ProcessLimits(cpu_seconds=0.05))
    error = refusal(processes, large)
    assert error.parameter == FIELD and "memory and time" in str(error)


def test_closing_ends_pictures_under_way_and_refuses_later_ones(opened):
    processes = opened(num_processes=1)
    check(processes)
    os.kill(only_child(processes), signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(processes.process, encoded(drawn(90, 60)), FIELD)
        while processes._idle:
            time.sleep(0.001)
        processes.close()
        with pytest.raises(EngineDeadError):
            under_way.result()
    with pytest.raises(EngineDeadError):
        processes.process(b"", FIELD)


def test_a_broken_checkpoint_is_found_before_any_process_starts():
    with pytest.raises(CheckpointError, match="size"):
        PictureProcesses("m", CONFIG, {"size": 7})
