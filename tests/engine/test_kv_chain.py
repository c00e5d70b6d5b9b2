"""Blocks that remember what was written to them: copies come behind the step that computes and before the one that
overwrites, loads before the step that reads, and what a failed step wrote is never kept."""

import random

import pytest

from tests.engine.fake_engine import counting_model
from tests.engine.fake_kv import FakeTransfer, KVExecutor, core_of, pieces_of
from tests.engine.test_kv_transfer import PRODUCES, PROMPT, VOCAB, handed_over, lease_of, request, run, step, tokens

BLOCK = 4
DOUBT = (-1, 0)
"""What a slot holds that a failed step wrote."""


class Device(KVExecutor):
    """Every slot of a block holds its token and what stands for all tokens up to it."""

    def __init__(self, num_blocks):
        super().__init__(counting_model(VOCAB), VOCAB, num_blocks, BLOCK)
        self.slots, self.tables, self.wrong = {}, {}, []

    def compute(self, scheduled):
        fails = self.fail_at.get(len(self.executed))
        for request_id in scheduled.removed_request_ids:
            self.tables.pop(request_id, None)
        for new in scheduled.new_requests:
            self.tables[new.request_id] = list(new.block_ids[0])
        for request_id, ids in zip(scheduled.request_ids, scheduled.new_block_ids):
            self.tables[request_id] += [] if ids is None else ids[0]
        done = super().compute(scheduled)
        rows = zip(scheduled.request_ids, scheduled.num_computed_tokens, scheduled.num_scheduled_tokens)
        for request_id, start, count in rows:
            self._compute_slots(request_id, start, count, fails is not None)
        return done

    def _compute_slots(self, request_id, start, count, fails):
        known, table = self.rows[request_id].token_ids, self.tables[request_id]
        for place in range(min(start + count, len(known))):
            slot, meant = (table[place // BLOCK], place % BLOCK), (known[place], hash(tuple(known[: place + 1])))
            if place >= start:
                self.slots[slot] = DOUBT if fails else meant
            elif self.slots.get(slot) != meant:
                self.wrong.append(f"{request_id} reads {self.slots.get(slot)} at {place}")

    def block(self, block_id):
        return [self.slots.get((block_id, i)) for i in range(BLOCK)]


class Copies(FakeTransfer):
    """Copies what blocks hold at that moment, and writes it to others."""

    def __init__(self, device, page_tokens):
        super().__init__(page_tokens)
        self._device, self._taken, self.kept = device, {}, {}
        self.num_checked = 0

    def save(self, save):
        super().save(save)
        ((pages, block_ids),) = pieces_of([save])
        slots = [slot for block_id in block_ids for slot in self._device.block(block_id)]
        for content, *taken in zip(pages, *(iter(slots),) * self.page_tokens, strict=True):
            if DOUBT not in taken and [slot and slot[0] for slot in taken] != list(content.token_ids):
                self._device.wrong.append(f"blocks {block_ids} are copied as {taken}, not {content.token_ids}")
            self._taken[content.key] = taken
            self.num_checked += 1

    def confirm(self, before):
        super().confirm(before)
        self.kept |= {key: self._taken[key] for key in self.stored if key in self._taken}

    def write(self, write):
        load, _ = self.came[write.load_id]
        super().write(write)
        for pages, ids in zip(load.pieces, write.block_ids):
            if any(ids):
                slots = [slot for page in pages for slot in self.kept[page.key]]
                if DOUBT in slots:
                    self._device.wrong.append("what a failed step wrote was loaded")
                places = [(block_id, i) for block_id in ids for i in range(BLOCK)]
                self._device.slots |= {place: slot for place, slot in zip(places, slots, strict=True) if place[0]}


def made(num_blocks=24, page_tokens=BLOCK, **options):
    device = Device(num_blocks)
    transfer = Copies(device, page_tokens)
    return core_of(device, transfer, **options), device, transfer


@pytest.mark.parametrize("seed", range(12))
def test_every_copy_is_where_it_belongs_in_the_chain(seed):
    draw = random.Random(seed)
    core, device, transfer = made(draw.choice([18, 24, 64]), [4, 8, 2][seed % 3])
    transfer.room = draw.choice([1, 4, 10**9])
    prompts, heard = {}, {}
    for number in range(30):
        name, kind = f"r{number}", draw.random()
        prompts[name] = [10 + draw.randrange(4), *PROMPT, *PROMPT][: draw.randint(1, 60)]
        core.add_request(request(name, prompts[name], draw.randint(1, 12)))
        for _ in range(draw.randrange(5)):
            step(core, heard)
        if kind < 0.2:
            core.reset_prefix_cache()
        elif kind < 0.4:
            transfer.finish([True, draw.random() < 0.7])
        elif kind < 0.5:
            core.sleep(1, draw.choice(["keep", "wait"]))
            core.wake_up()
        elif kind < 0.55:
            core.abort_requests([name])
        elif kind < 0.7 and not core.has_work():
            core.save_idle()
    run(core, heard)
    assert not device.wrong and transfer.num_checked > 20
    assert transfer.num_written, "nothing was loaded"


@pytest.mark.parametrize("page_tokens", [4, 8, 2])
def test_what_finds_no_room_is_saved_later_by_steps_or_when_idle_or_before_its_content_is_lost(page_tokens):
    wanted = None
    for room in (10**9, 3, 1):
        for lost_by in ("idle", "reset", "sleep", "end", "steps"):
            core, device, transfer = made(64, page_tokens)
            transfer.room = room
            core.add_request(request("a", [1, *PROMPT, *PROMPT[:19]], 1))
            run(core)
            if lost_by == "idle":
                while core.save_idle():
                    pass
            elif lost_by == "reset":
                assert core.reset_prefix_cache()
            elif lost_by == "sleep":
                core.sleep(1)
            elif lost_by == "end":
                core.shutdown()
            else:
                core.add_request(request("b", [2], 62))
                run(core)
            wanted = wanted or set(transfer.stored)
            assert wanted <= set(transfer.stored), (lost_by, room)
            assert not transfer.given_up and not device.wrong
    assert len(wanted) == 60 // page_tokens


def test_what_is_overwritten_goes_first_and_what_finds_no_room_then_is_given_up():
    core, device, transfer = made(24)
    transfer.room = 0
    core.add_request(request("a", PROMPT, 1))
    run(core)
    assert len(core.transfers.saves) == 10 and not transfer.given_up
    transfer.room = 2
    core.add_request(request("b", range(60, 100), 1))
    core.add_request(request("c", range(50, 90), 1))
    run(core)
    kept = {key for key, page in transfer.stored.items() if page.token_ids[0] in PROMPT[::4]}
    given_up = set(transfer.given_up)
    assert transfer.given_up and kept.isdisjoint(given_up) and not device.wrong
    while core.save_idle():
        pass
    assert not core.transfers.saves and len(transfer.stored) > 20


def test_tiers_that_end_with_the_engine_get_nothing_from_its_end():
    core, _, transfer = made(64)
    transfer.room, transfer.connector.outlives = 1, False
    core.add_request(request("a", PROMPT, 1))
    run(core)
    before = len(transfer.unconfirmed) + len(transfer.stored)
    core.shutdown()
    assert len(transfer.unconfirmed) + len(transfer.stored) == before < 10


@pytest.mark.parametrize("page_tokens", [4, 8, 2])
@pytest.mark.parametrize("when", ["dispatch", "result"])
def test_what_a_failed_step_wrote_is_kept_nowhere(when, page_tokens):
    for number in range(16):
        core, device, transfer = made(64, page_tokens)
        device.fail_at, transfer.room = {number // 2: when}, 10**9 if number % 2 else 2
        core.add_request(request("a", PROMPT, 12))
        core.add_request(request("b", PROMPT[5:], 12))
        run(core)
        assert not any(DOUBT in transfer.kept[key] for key in transfer.stored), f"of step {number // 2}"
        device.wrong.clear()  # the step behind the failed one reads what that wrote, and fails with it
        core.reset_prefix_cache()
        device.fail_at = {}
        core.add_request(request("c", PROMPT, 5))
        expected = [5 + (PROMPT[-1] + i + 1 - 5) % (VOCAB - 5) for i in range(5)]
        assert tokens(run(core)["c"]) == expected and not device.wrong


def test_what_is_lent_is_copied_before_the_next_request_takes_its_blocks():
    core, device, transfer = made(18)
    core.add_request(handed_over(PRODUCES, 1))
    core.add_request(request("next", PROMPT[::-1], 12))
    core.add_request(request("last", [9, *PROMPT], 12))
    run(core)
    assert not device.wrong and transfer.num_checked > 10


def test_a_prompt_whose_request_fails_is_not_lent():
    core, device, transfer = made(64)
    device.bad_requests["a"] = "its logits are no numbers"
    core.add_request(handed_over(PRODUCES, 3))
    outputs = run(core)["a"]
    assert outputs[-1].finish_reason == "error"
    said = [output.kv_transfer_params for output in outputs]
    assert said[-1] is None and transfer.taken_back == [
        lease_of(output) for output in outputs if output.kv_transfer_params
    ]
