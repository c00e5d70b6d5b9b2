"""Which programs are chosen for a step; that they are launched is tested end to end."""

from types import SimpleNamespace

import pytest

from jaxpaged.errors import EngineError, RequestError
from jaxpaged.kv_cache_spec import EncoderCacheConfig
from jaxpaged.messages import EncoderInput, MultiModalFeature, NewRequestData, ProgramKey, SchedulerOutput
from jaxpaged.models.vision.interface import VisionConfig
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.features import Extra, features_of
from jaxpaged.worker.encoder_spec import EncoderSpec
from jaxpaged.worker.programs.choose import DECODES_THAT_PAY, MULTI_STEP_SAVES_SECONDS, ProgramChoice, StepSizes
from jaxpaged.worker.programs.compiled import CompiledPrograms

SIZES = (2, 8, 16)
RUNS = {ProgramKey(kind, size): 32 for kind in ("decode", "decode_full") for size in SIZES[:2]}
EVERY = [
    *(ProgramKey(kind, size) for kind in ("forward", "sample", "sample_masked", "sample_full") for size in SIZES),
    ProgramKey("prompt_logprobs"),
    ProgramKey("load_row"),
    ProgramKey("load_tokens"),
    *(ProgramKey(kind, size) for kind in ("encode", "encode_video") for size in (1, 4)),
    *RUNS,
]
NEEDED = {
    Extra.MASKS: {("sample_masked", 16)},
    Extra.PROMPT_LOGPROBS: {("prompt_logprobs", 0)},
    Extra.FULL_SAMPLER: {("sample_full", 16), ("load_row", 0), ("load_tokens", 0)},
    Extra.PICTURES: {("encode", 1), ("encode", 4)},
    Extra.VIDEOS: {("encode_video", 1), ("encode_video", 4)},
}
TOWER = VisionConfig(
    family="drawn",
    width=8,
    num_layers=1,
    num_heads=1,
    head_dim=8,
    columns=8,
    patch=2,
    out_width=8,
    norm_eps=1e-6,
    activation="gelu",
    item_pixels=(4, 4, 3),
    embeds_per_item=4,
)
ENCODER = EncoderSpec(None, TOWER, EncoderCacheConfig(8, 4, 32), sizes=(1, 4), largest=(1, 2, 2))


def choice_with(builders, **sizes):
    programs = CompiledPrograms(builders, num_threads=1, on_demand=list(builders))
    given = {"output": "sample", "multi_steps": RUNS, "needs_full": features_of, "encoder": ENCODER, **sizes}
    return programs, ProgramChoice(programs, StepSizes(tokens=SIZES, samples=SIZES, **given))


def compiled(keys=EVERY, **options):
    """A choice among programs of which `keys` are compiled."""
    builders = {key: lambda key=key: SimpleNamespace(compile=lambda: key) for key in {*EVERY, *keys}}
    programs, choice = choice_with(builders, **options)
    for key in keys:
        assert programs[key] == key
    return programs, choice


def chosen(choice, scheduled):
    """The programs of a step, one after the other."""
    return tuple(choice.choose(scheduled).keys)


def step(ids, tokens, most, new=(), removed=(), num_steps=1, masked=False):
    requests = [NewRequestData(name, [1], 1, 0, ([],), params) for name, params in new]
    scheduled = SchedulerOutput(1, requests, list(removed), ids, tokens, [0] * len(ids), most, [None] * len(ids))
    scheduled.total_num_scheduled_tokens, scheduled.num_steps, scheduled.masked = sum(tokens), num_steps, masked
    return scheduled


PLAIN, FULL = SamplingParams(), SamplingParams(logprobs=1)


@pytest.mark.parametrize("extra", Extra)
def test_steps_can_run_once_the_programs_for_any_number_of_requests_are_there(extra):
    programs, choice = choice_with({key: lambda key=key: SimpleNamespace(compile=lambda: key) for key in EVERY})
    while not choice.can_run(extra):
        pass
    assert set(programs.wait_all()) == NEEDED[extra], "others, and narrower ones, wait until a step could use them"
    for kind, size in NEEDED[extra]:
        assert not size or kind.startswith("encode") or programs.smallest_ready(kind, 1, SIZES) == 16


@pytest.mark.parametrize("extra", Extra)
def test_a_program_that_cannot_be_compiled_is_told_without_its_innards(extra):
    def fail():
        raise ValueError("at /srv/model.py:7")

    programs, choice = choice_with(dict.fromkeys(EVERY, fail))
    assert not choice.can_run(extra)
    while not programs.num_ready:
        pass
    with pytest.raises(EngineError, match="could not be compiled; the engine's log says why") as caught:
        choice.can_run(extra)
    assert "srv" not in str(caught.value)


def test_steps_are_as_large_as_what_is_compiled_and_what_they_lack_is_next(monkeypatch):
    programs, choice = compiled([ProgramKey("forward", 2), ProgramKey("sample", 2)], small_prompt=4)
    assert choice.max_step_tokens() == 4, "no smaller than that, even if it has to be waited for"
    assert programs[ProgramKey("forward", 8)] and choice.max_step_tokens() == 8
    missed = []
    monkeypatch.setattr(programs, "miss", lambda *lack: missed.append(lack))
    chosen(choice, step(["a"], [7], [0], [("a", PLAIN)]))
    chosen(choice, step(["a"], [8], [0]))
    assert missed == [(ProgramKey("forward", 16), 8)]
    assert programs[ProgramKey("forward", 16)] and choice.max_step_tokens() == 16
    chosen(choice, step(["a"], [16], [0]))
    assert len(missed) == 1


def test_a_step_is_a_forward_pass_and_what_finishes_it_where_somebody_gets_a_token():
    _, choice = compiled()
    assert chosen(choice, step([], [], [])) == ()
    assert chosen(choice, step(["a"], [7], [0], [("a", PLAIN)])) == (("forward", 8),)
    assert chosen(choice, step(["a", "b"], [9, 1], [0, 1], [("b", PLAIN)])) == (("forward", 16), ("sample", 2))
    assert chosen(choice, step(["a", "b"], [1, 1], [1, 1], masked=True)) == (("forward", 2), ("sample_masked", 2))


def test_an_engine_that_drafts_calls_other_programs_only_in_steps_with_drafts():
    verify = {"sample": "verify", "sample_full": "verify_full", "sample_masked": "verify_masked"}
    keys = [*EVERY, *(ProgramKey(kind, size) for kind in ("draft", *verify.values()) for size in SIZES)]
    _, drafts = compiled(keys, verify=verify)
    _, plain = compiled()
    new = [("a", PLAIN), ("b", FULL)]
    for scheduled in (
        step(["a", "b"], [7, 1], [0, 1], new),
        step(["a", "b"], [1, 1], [1, 1]),
        step(["a"], [1], [1]),
        step(["a", "b"], [1, 1], [1, 1], masked=True),
        step(["a"], [4], [4], num_steps=4),
    ):
        assert chosen(drafts, scheduled) == chosen(plain, scheduled)
    with_drafts = step(["a", "b"], [4, 1], [4, 1])
    assert chosen(drafts, with_drafts) == (("draft", 2), ("forward", 8), ("verify_full", 2))


def test_only_steps_in_which_somebody_needs_the_full_sampler_get_it():
    _, choice = compiled()
    full = step(["a", "b"], [1, 1], [1, 1], [("a", PLAIN), ("b", FULL)])
    assert chosen(choice, full)[1] == ("sample_full", 2)
    assert chosen(choice, step(["a", "b"], [1, 1], [1, 0]))[1] == ("sample", 2), "who needs it gets no token"
    assert chosen(choice, step(["a", "b"], [4, 4], [4, 4], num_steps=4)) == (("decode_full", 2),)
    assert chosen(choice, step(["a"], [4], [4], removed=["b"], num_steps=4)) == (("decode", 2),)
    assert chosen(choice, step(["b"], [1], [1], [("b", PLAIN)]))[1] == ("sample", 2), "another request of that name"
    chosen(choice, step(["c"], [1], [1], [("c", FULL)]))
    choice.forget_requests()
    assert chosen(choice, step(["c"], [1], [1], [("c", PLAIN)]))[1] == ("sample", 2)


def test_a_request_that_the_worker_will_refuse_is_a_plain_one():
    def refuse(params):
        raise RequestError("no", "extra_args")

    _, choice = compiled(needs_full=refuse)
    assert chosen(choice, step(["a"], [1], [1], [("a", FULL)]))[1] == ("sample", 2)


def test_a_pooling_engine_has_an_output_stage_of_its_own():
    _, choice = compiled([ProgramKey("forward", 16)], output="pool", needs_full=lambda params: False)
    found = chosen(choice, step(["a", "b"], [9, 1], [0, 1], [("a", PLAIN), ("b", PLAIN)]))
    assert found == (("forward", 16), ("pool", 2))


def test_a_narrower_program_is_wanted_once_a_step_could_use_it():
    programs, choice = compiled([ProgramKey("forward", 2), ProgramKey("sample_full", 16)])
    scheduled = step(["a"], [1], [1], [("a", FULL)])
    assert chosen(choice, scheduled)[1] == ("sample_full", 16)
    assert programs[ProgramKey("sample_full", 2)] == ("sample_full", 2)
    assert chosen(choice, step(["a"], [1], [1]))[1] == ("sample_full", 2)


def test_runs_are_as_long_as_the_program_that_all_requests_fit_once_it_is_compiled():
    programs, choice = compiled([])
    chosen(choice, step(["a", "b", "c"], [1, 1, 1], [1, 1, 1], [(name, PLAIN) for name in "abc"]))
    assert choice.max_decode_steps() == 1
    assert {("decode", 2, "ready"), ("decode", 2, "compiling"), ("decode", 2, "queued")} & set(programs.states), (
        "one request gains the most"
    )
    assert programs[ProgramKey("decode", 8)] == ("decode", 8), "who asks wants it"
    assert choice.max_decode_steps() == 32
    chosen(choice, step(["d"], [1], [1], [("d", FULL)], removed=["a"]))
    assert choice.max_decode_steps() == 1, "somebody needs the full one"
    nine = [(f"n{i}", PLAIN) for i in range(9)]
    chosen(choice, step([name for name, _ in nine], [1] * 9, [1] * 9, nine))
    assert choice.max_decode_steps() == 1, "there are none so wide"


def test_steps_in_which_all_decode_become_one_program_once_they_are_many(monkeypatch):
    programs, choice = compiled([ProgramKey(kind, 2) for kind in ("forward", "sample", "sample_masked", "sample_full")])
    two = ("forward", 2), ("sample", 2)
    decodes = step(["a", "b"], [1, 1], [1, 1], [("a", PLAIN), ("b", PLAIN)])
    missed = []
    monkeypatch.setattr(programs, "miss_seconds", lambda *lack: missed.append(lack))
    for _ in range(DECODES_THAT_PAY - 1):
        assert chosen(choice, decodes) == two
    assert ("decode", 2, "queued") not in programs.states and ("decode", 2, "ready") not in programs.states
    assert not missed
    assert chosen(choice, decodes) == two, "from now on it is wanted, and nobody waits for it"
    assert missed == [(ProgramKey("decode", 2), MULTI_STEP_SAVES_SECONDS)]
    assert programs[ProgramKey("decode", 2)] == ("decode", 2)
    assert chosen(choice, decodes) == (("decode", 2),)
    assert chosen(choice, step(["a", "b"], [1, 1], [1, 0])) == two, "b's prompt goes on"
    assert chosen(choice, step(["a", "b"], [1, 1], [1, 1], masked=True)) == (("forward", 2), ("sample_masked", 2))
    assert chosen(choice, step(["a", "f"], [1, 1], [1, 1], [("f", FULL)]))[1] == ("sample_full", 2)
    assert chosen(choice, decodes) == (("decode", 2),)
    nine = [f"n{i}" for i in range(9)]
    for _ in range(DECODES_THAT_PAY + 1):
        assert chosen(choice, step(nine, [1] * 9, [1] * 9)) == (("forward", 16), ("sample", 16)), "none is so wide"


def test_where_compiling_takes_no_cores_a_step_in_which_all_decode_has_its_own_program_from_the_first_on():
    """A run of one step, as a GPU has it: with the full sampler too, whose log probabilities are then of one step."""
    single = {"multi_steps": dict.fromkeys(RUNS, 1), "decodes_that_pay": 1}
    programs, choice = compiled([ProgramKey(kind, 2) for kind in ("forward", "sample", "sample_full")], **single)
    decodes = step(["a", "b"], [1, 1], [1, 1], [("a", PLAIN), ("b", PLAIN)])
    assert chosen(choice, decodes) == (("forward", 2), ("sample", 2)), "it is wanted, and nobody waits for it"
    assert programs[ProgramKey("decode", 2)] == ("decode", 2)
    assert chosen(choice, decodes) == (("decode", 2),)
    assert choice.max_decode_steps() == 1
    full = step(["a", "f"], [1, 1], [1, 1], [("f", FULL)], removed=["b"])
    assert chosen(choice, full) == (("forward", 2), ("sample_full", 2))
    assert programs[ProgramKey("decode_full", 2)] == ("decode_full", 2)
    assert chosen(choice, step(["a", "f"], [1, 1], [1, 1])) == (("decode_full", 2),)
    assert chosen(choice, step(["a"], [1], [1])) == (("decode", 2),), "who needs the full sampler is not in it"


@pytest.mark.parametrize(
    ("ready", "items", "buckets"),
    [
        ((1, 4), [1], [1]),
        ((1, 4), [1, 3], [4]),
        ((1, 4), [2, 1], [1, 1, 1]),
        ((1, 4), [5, 1], [4, 1, 1]),
        ((4,), [2], [4]),
    ],
)
def test_pictures_fill_the_programs_that_there_are(ready, items, buckets):
    keys = [*EVERY[:3], *(ProgramKey("encode", size) for size in ready)]
    _, choice = compiled([*keys, ProgramKey("sample", 2)])
    scheduled = step(["a"], [2], [1])
    scheduled.encoder_inputs = [
        EncoderInput(MultiModalFeature(b"k" * 32, "image", 0, 4 * n, [(0, 4 * n)], (n, 2, 2)), []) for n in items
    ]
    programs = choice.choose(scheduled)
    assert [key.size for key in programs.encode] == buckets and programs.forward == ProgramKey("forward", 2)
    assert programs.keys == [*programs.encode, programs.forward, programs.finish]
    scheduled.encoder_inputs = []
    assert not choice.choose(scheduled).encode


def test_moments_of_videos_have_programs_of_their_own():
    _, choice = compiled()
    scheduled = step(["a"], [2], [1])
    scheduled.encoder_inputs = [
        EncoderInput(MultiModalFeature(b"k" * 32, modality, 0, 4, [(0, 4)], (1, 2, 2)), [])
        for modality in ("video", "image", "video", "video")
    ]
    found = [(key.kind, key.size) for key in choice.choose(scheduled).encode]
    assert found == [("encode", 1), *[("encode_video", 1)] * 3]


def test_a_prompt_that_ends_in_a_picture_takes_no_decode_program():
    _, choice = compiled()
    scheduled = step(["a", "b"], [1, 1], [1, 1], new=[("a", PLAIN), ("b", PLAIN)])
    scheduled.new_requests[1].mm_features = [MultiModalFeature(b"k" * 32, "image", 0, 1, [(0, 1)], (1, 1, 1))]
    for _ in range(DECODES_THAT_PAY + 1):
        assert not choice.choose(scheduled).multi_step and choice.max_decode_steps() == 1
        scheduled.new_requests = []
    scheduled = step(["a"], [1], [1], removed=["b"])
    for _ in range(DECODES_THAT_PAY + 1):
        multi_step = choice.choose(scheduled).multi_step
    assert multi_step and choice.max_decode_steps() > 1
