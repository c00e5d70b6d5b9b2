"""What the core has of a group: no more than its window, in order, whatever ends and is aborted meanwhile."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.engine.admission import AdmissionWindow


def sequences(name, count):
    return [SimpleNamespace(request_id=f"{name}{i}") for i in range(count)]


class Core:
    """Which sequences are expected, and which of them were sent."""

    def __init__(self, most):
        self.expected, self.sent = set(), []
        self.window = AdmissionWindow(most, self.expected.__contains__, self.take)

    def take(self, requests):
        self.sent += [request.request_id for request in requests]

    def enter(self, group, prompt, count):
        self.expected.update(each.request_id for each in sequences(prompt, count))
        self.window.enter(group, sequences(prompt, count))

    def in_core(self, group):
        return [each for each in self.sent if each in self.expected and each.startswith(group)]


@given(st.data(), st.integers(1, 5))
def test_of_every_group_the_core_has_as_much_as_its_window_or_all_there_is(data, most):
    core, prompts, order = Core(most), {}, []
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["enter", "end", "abort"])):
            case "enter":
                group, count = data.draw(st.sampled_from("ab")), data.draw(st.integers(1, 8))
                prompt = f"{group}{len(prompts)}-"
                prompts[prompt] = [f"{prompt}{i}" for i in range(count)]
                order += prompts[prompt]
                core.enter(group, prompt, count)
                while core.window.refill(group, 2):
                    assert len(core.in_core(group)) < most
            case "end" if core.in_core(""):
                core.expected.discard(data.draw(st.sampled_from(core.in_core(""))))
            case "abort" if prompts:
                core.expected.difference_update(prompts[data.draw(st.sampled_from(sorted(prompts)))])
        core.window.refill_all()
        for group in "ab":
            unfinished = [each for each in order if each in core.expected and each.startswith(group)]
            assert core.in_core(group) == unfinished[:most], "the oldest of them, and no more"
    assert len(core.sent) == len(set(core.sent))
    for prompt in prompts:
        core.expected.difference_update(prompts[prompt])
        core.window.leave(prompt[0])
    core.window.refill_all()
    assert not core.window._groups and not core.window._waiting
