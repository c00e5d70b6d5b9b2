from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.engine.output.detokenizer import TextStream, make_detokenizer
from jaxpaged.engine.output.plain_pieces import INCOMPLETE
from jaxpaged.sampling_params import SamplingParams
from tests.engine.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
any_ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30)
texts = st.text(alphabet="abcd the cat😀é\n", max_size=30)


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def run(detokenizer, ids, cuts=(), ended_by_token=False):
    """Push ids in steps that end at `cuts`; returns (tokens that count, stop string, what a stream would show)."""
    shown, counted, start = "", 0, 0
    for end in [*sorted(set(cuts)), len(ids)]:
        if end <= start and end != len(ids):
            continue
        count, stop = detokenizer.push(ids[start:end], ended_by_token and end == len(ids))
        counted += count
        if stop is not None or end == len(ids):
            detokenizer.finish()
        shown += detokenizer.take_new_text()
        if stop is not None:
            return counted, stop, shown
        start = end
    return counted, None, shown


def stream(prompt, ids, skip=True, spaces=True, tokenizer=TOKENIZER):
    text = TextStream(tokenizer, prompt, skip, spaces)
    return "".join(text.push(i) for i in ids) + text.flush()


def whole(prompt, ids, stops, **options):
    """The oracle: the text of all ids at once, cut at the stop string that ends first."""
    text = stream(prompt, ids)
    ends = [(text.find(s) + len(s), i) for i, s in enumerate(stops) if s in text]
    return text if not ends else text[: min(ends)[0] - len(stops[min(ends)[1]])]


@given(any_ids, st.booleans())
def test_a_stream_gives_the_text_of_the_whole(ids, skip):
    assert stream([], ids, skip).rstrip(INCOMPLETE) == TOKENIZER.decode(ids, skip).rstrip(INCOMPLETE)


@given(texts, texts)
def test_a_stream_continues_its_prompt(prompt, text):
    assert stream(ids_of(prompt), ids_of(text)) == text


@given(texts)
def test_no_part_of_a_character_is_ever_shown(text):
    assume(INCOMPLETE not in text)
    pieces = TextStream(TOKENIZER, [], True, True)
    assert INCOMPLETE not in "".join(pieces.push(i) for i in ids_of(text)[:-1])


def test_a_character_that_the_prompt_began_belongs_to_the_output():
    face = ids_of("😀")
    assert stream([*ids_of("hello "), *face[:2]], [*face[2:], *ids_of(" sat")]) == "😀 sat"


def test_a_broken_character_at_the_end_of_the_prompt_is_not_shown():
    assert stream([*ids_of("hello "), ids_of("😀")[0]], ids_of("cat")) == "cat"


def test_an_unfinished_character_at_the_end_is_dropped():
    assert stream([], [*ids_of("cat"), *ids_of("😀")[:3]]) == "cat"


def test_a_space_survives_at_the_border_of_a_sentencepiece_prompt():
    vocabulary = {"▁the": 0, "▁cat": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend)
    assert stream([0], [1, 2, 3, 4, 1], tokenizer=tokenizer) == " cat€ cat"
    assert stream([0], [1, 2, 3, 1], tokenizer=tokenizer) == f" cat{INCOMPLETE * 2} cat"
    assert stream([], [1], tokenizer=tokenizer) == "cat"


def test_special_tokens_are_skipped_or_shown():
    ids = [*ids_of("cat"), 3, 4, *ids_of("sat")]
    assert stream([], ids, skip=True) == "catsat"
    assert stream([], ids, skip=False) == "cat<turn><end>sat"


def test_spaces_between_special_tokens_can_be_left_out():
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.add_special_tokens(["<x>", "<y>"])
    tokenizer = Tokenizer(backend)
    assert stream([], [0, 2, 3, 1], skip=False, spaces=True, tokenizer=tokenizer) == "a <x> <y> b"
    assert stream([], [0, 2, 3, 1], skip=False, spaces=False, tokenizer=tokenizer) == "a <x><y> b"


stops = st.lists(st.text(alphabet="abct ", min_size=1, max_size=5), min_size=1, max_size=3)


@given(texts, texts, stops, st.lists(st.integers(0, 30)), st.booleans())
@example("", "the cat", ["the", "e"], [], False)
def test_the_text_does_not_depend_on_how_tokens_are_cut_into_steps(prompt, text, stops, cuts, keep):
    params = SamplingParams(stop=stops, include_stop_str_in_output=keep)
    ids = ids_of(text)
    results = []
    for steps in (range(len(ids)), cuts, ()):
        detokenizer = make_detokenizer(TOKENIZER, ids_of(prompt), params)
        counted, stop, shown = run(detokenizer, ids, [c for c in steps if c < len(ids)])
        assert shown == detokenizer.text, "what was streamed is what is there in the end"
        results.append((counted, stop, shown))
    assert results[0] == results[1] == results[2]
    assert results[0][1] is None or any(stop in text for stop in stops)
    if not keep:
        assert results[0][2] == whole(ids_of(prompt), ids, stops)


@given(texts, any_ids, st.lists(st.integers(1, 3), max_size=20))
def test_text_that_is_taken_as_it_comes_is_the_text_that_is_taken_later(prompt, ids, lengths):
    taken, kept = (make_detokenizer(TOKENIZER, ids_of(prompt), SamplingParams()) for _ in range(2))
    shown, start = "", 0
    for length in lengths:
        shown += taken.push_and_take(ids[start : start + length])
        start += length
    taken.push(ids[start:], False)
    kept.push(ids, False)
    for each in (taken, kept):
        each.finish()
    assert shown + taken.take_new_text() == kept.text


def test_a_stop_string_over_several_tokens_never_leaks():
    detokenizer = make_detokenizer(TOKENIZER, [], SamplingParams(stop=["stop"]))
    for letter, expected in zip("a sto", ["", "", "", "a", "a "], strict=True):
        detokenizer.push(ids_of(letter), False)
        assert detokenizer.text == expected
    assert detokenizer.push(ids_of("p"), False) == (1, "stop")
    assert detokenizer.text == "a "


def test_what_was_withheld_appears_when_the_sequence_ends():
    detokenizer = make_detokenizer(TOKENIZER, [], SamplingParams(stop=["stop"]))
    detokenizer.push(ids_of("a sto"), False)
    detokenizer.finish()
    assert detokenizer.text == "a sto"


def test_the_stop_string_that_ends_first_wins_and_ties_go_to_the_first_in_the_list():
    cases = ((["cat sat", "at"], "at", "the c"), (["cat", "at"], "cat", "the "), (["at", "cat"], "at", "the c"))
    for stops, found, text in cases:
        detokenizer = make_detokenizer(TOKENIZER, [], SamplingParams(stop=stops))
        assert detokenizer.push(ids_of("the cat sat"), False)[1] == found
        assert detokenizer.text == text


def test_stop_strings_are_kept_when_asked():
    detokenizer = make_detokenizer(TOKENIZER, [], SamplingParams(stop=["at s"], include_stop_str_in_output=True))
    count, stop = detokenizer.push(ids_of("the cat sat on"), False)
    assert (stop, detokenizer.text) == ("at s", "the cat s")
    assert count < len(ids_of("the cat sat on"))


def test_no_stop_string_counts_before_min_tokens():
    letters = [i for letter in "abababab" for i in ids_of(letter)]
    detokenizer = make_detokenizer(TOKENIZER, [], SamplingParams(stop=["ab"], min_tokens=4, max_tokens=9))
    assert detokenizer.push(letters, False) == (6, "ab")
    assert detokenizer.text == "abab"


def test_the_token_that_ends_a_text_is_shown_only_when_asked():
    for keep, text in ((False, "cat"), (True, "cat<eos>")):
        params = SamplingParams(include_stop_str_in_output=keep, skip_special_tokens=False)
        detokenizer = make_detokenizer(TOKENIZER, [], params)
        ids = [*ids_of("cat"), TOKENIZER.eos_token_id]
        assert detokenizer.push(ids, ended_by_token=True) == (len(ids), None)
        detokenizer.finish()
        assert detokenizer.text == text


def test_broken_bytes_without_end_are_shown_in_time_and_harm_no_character():
    broken = [ids_of("😀")[0]] * 300
    for tail, text in (("😀 cat", "😀 cat"), ("", "")):
        shown = stream([], [*broken, *ids_of(tail)])
        assert shown.strip(INCOMPLETE) == text
        assert tail == "" or shown == TOKENIZER.decode([*broken, *ids_of(tail)])
    pieces = TextStream(TOKENIZER, [], True, True)
    assert all(pieces.push(i) is not None and len(pieces._held) <= 64 for i in broken)


def test_skipped_and_unknown_ids_leave_no_trace():
    face = ids_of("😀")
    ids = [*ids_of("the"), *[TOKENIZER.eos_token_id, 5000] * 200, *face[:2], 2, *face[2:]]
    assert stream([], ids) == "the😀"
