"""Steps made by hand, and engines that made some."""

import contextlib
import importlib.util

import matplotlib.text

from jaxpaged.entrypoints.llm import LLM
from jaxpaged.messages import StepRecord
from jaxpaged.sampling_params import SamplingParams
from tests.engine.fake_engine import make_engine


def record(step_id=1, tokens=5, bucket=8, begin=0.0, unfinished=1, num_steps=1, **times):
    """A step of 10 seconds: schedule 1, dispatch 2, nothing for 1, waiting for 4, update 2."""
    ends = {
        "schedule_begin": begin,
        "schedule_end": begin + 1,
        "dispatch_end": begin + 3,
        "wait_begin": begin + 4,
        "result_ready": begin + 8,
        "update_end": begin + 10,
    }
    return StepRecord(
        step_id=step_id,
        num_tokens=tokens,
        token_bucket=bucket,
        num_requests=2,
        num_sampled=1,
        sample_bucket=8,
        full_sampler=False,
        num_unfinished=unfinished,
        num_steps=num_steps,
        **(ends | times),
    )


def llm_after(num_requests=5, max_tokens=4):
    """An LLM over a fake device that has answered some prompts."""
    llm = LLM.from_engine(make_engine()[0])
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    if num_requests:
        llm.generate([[10 + i] * 9 for i in range(num_requests)], params, use_tqdm=False)
    return llm


def llm_under_way():
    """An LLM whose requests, three of which begin alike, are being answered."""
    llm = LLM.from_engine(make_engine()[0])
    for i in range(3):
        prompt = {"prompt_token_ids": [20] * 8 + [30 + i]}
        llm.llm_engine.add_request(f"r{i}", prompt, SamplingParams(temperature=0.0, max_tokens=20))
        llm.llm_engine.step()
    return llm


def overprinted(figure):
    """Pairs of texts in a picture that lie over each other, and texts that reach over its border."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    hidden = {label for axes in figure.axes for label in labels_out_of_sight(axes)}
    texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_visible() and text not in hidden]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text().strip()]
    pairs = [(a, b) for i, (a, box) in enumerate(boxes) for b, other in boxes[i + 1 :] if box.overlaps(other)]
    width, height = figure.canvas.get_width_height()
    beyond = [text for text, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]
    return pairs, beyond


def labels_out_of_sight(axes):
    """Tick labels beyond the ends of their axis exist, and are not drawn."""
    for axis, place in ((axes.xaxis, 0), (axes.yaxis, 1)):
        low, high = sorted(axis.get_view_interval())
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if not low <= tick.label1.get_position()[place] <= high:
                yield tick.label1


@contextlib.contextmanager
def without_matplotlib(monkeypatch):
    find = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
        yield
