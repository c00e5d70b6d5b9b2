"""Which core gets which prompt: the least loaded one, unless another one knows how the prompt begins."""

import random

import pytest

from jaxpaged.core import balancer
from jaxpaged.core.balancer import MOST_TOKENS, WORTH_OF_WHOLE_PROMPT, Balancer, Load

IDLE = Load(0, 0)


def test_a_waiting_sequence_counts_four_running_ones_and_equals_take_turns():
    loads = [Load(7, 0), Load(0, 2), Load(6, 0)]
    assert Balancer(3, 0).choose([], None, loads) == 2
    assert Balancer(2, 0).choose([], None, [Load(4, 0), Load(0, 1)]) == 0, "equal"
    turns = Balancer(3, 0)
    assert [turns.choose([1, 2, 3], None, [IDLE] * 3) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_who_cannot_be_used_comes_last_whatever_its_load():
    loads = [Load(0, 0, is_usable=False), Load(90, 90)]
    assert Balancer(2, 16).choose(range(99), None, loads) == 1
    assert Balancer(2, 16).choose(range(99), None, loads[:1] * 2) == 0


def test_a_prompt_goes_where_its_beginning_went_within_limits_and_with_its_salt():
    chat = list(range(1000))
    at_home = lambda cores, loads, salt=None: cores.choose(chat + [7] * 24, salt, loads) == home
    cores = Balancer(2, 16)
    home = cores.choose(chat, None, [IDLE, IDLE])
    busy = [IDLE, IDLE]
    busy[home] = Load(WORTH_OF_WHOLE_PROMPT - 1, 0)
    assert at_home(cores, busy)
    busy[home] = Load(WORTH_OF_WHOLE_PROMPT + 1, 0)
    assert not at_home(cores, busy), "now both know it"
    salted = Balancer(2, 16)
    salted.give(home, chat, "mine")
    assert at_home(salted, busy[::-1], "mine") and not at_home(salted, [Load(1, 0)] * home + [Load(1, 0), IDLE], None)


def test_what_all_begin_with_moves_nobody():
    cores, system = Balancer(4, 16), list(range(320))
    for core in range(4):
        cores.give(core, system, None)
    assert [cores.choose([*system, 5000 + i], None, [IDLE] * 4) for i in range(4)] == [0, 1, 2, 3]


def test_a_cache_that_was_emptied_attracts_nobody():
    cores = Balancer(2, 16)
    cores.give(1, range(64), None)
    cores.forget(1)
    assert cores.choose(range(64), None, [IDLE, Load(1, 0)]) == 0


@pytest.mark.parametrize("num_tokens", [15, 16, 600, 5000, MOST_TOKENS, 30_000])
def test_all_but_a_sixteenth_of_what_is_known_is_recognised(num_tokens):
    cores = Balancer(3, 16)
    cores.give(1, range(num_tokens), None)
    known = cores._known(list(cores._beginnings(range(100_000), None)))
    whole = min(num_tokens, MOST_TOKENS) // 16 * 16
    assert known[0] == known[2] == 0 and whole * 15 / 16 <= known[1] <= whole


def test_memory_is_bounded_and_the_newest_stays(monkeypatch):
    monkeypatch.setattr(balancer, "MOST_BEGINNINGS", 100)
    cores = Balancer(2, 16)
    for number in range(200):
        cores.give(0, [number] * 64, None)
    assert len(cores._knowers) == 100
    assert cores.choose([199] * 64, None, [Load(3, 0), IDLE]) == 0
    assert cores.choose([0] * 64, None, [Load(3, 0), IDLE]) == 1


def test_chats_find_most_of_what_they_may_and_by_turns_they_would_find_half():
    """40 chats of 8 turns, in any order, on 4 cores: tokens that the core of a prompt had computed before."""
    draw = random.Random(7)
    histories = [[draw.randrange(4000) for _ in range(200)] for _ in range(40)]
    turns = [chat for chat in range(40) for _ in range(8)]
    draw.shuffle(turns)
    cores, found, at_random, most = Balancer(4, 16), 0, 0, 0
    given: dict[str, list[dict[int, int]]] = {name: [{} for _ in range(40)] for name in ("chosen", "random")}
    for chat in turns:
        prompt = histories[chat]
        core, other = cores.choose(prompt, None, [Load(draw.randrange(6), 0) for _ in range(4)]), draw.randrange(4)
        found += given["chosen"][chat].get(core, 0)
        at_random += given["random"][chat].get(other, 0)
        most += max(given["chosen"][chat].values(), default=0)
        given["chosen"][chat][core] = given["random"][chat][other] = len(prompt)
        prompt += [draw.randrange(4000) for _ in range(100)]
    assert found >= 0.95 * most
    assert at_random <= 0.65 * found
