from tests.tools.pictures.records import llm_after


def test_stats_say_what_was_done():
    shown = repr(llm_after(num_requests=5, max_tokens=4).stats())
    assert "0 running, 0 waiting; ended: 5 by length" in shown
    assert "45 of prompts, 20 generated" in shown
    assert "5 of them" in shown


def test_stats_of_an_engine_that_did_nothing():
    shown = repr(llm_after(num_requests=0).stats())
    assert "ended: none" in shown
    assert "none yet" in shown


def test_stats_of_an_executor_with_buckets_show_padding():
    llm = llm_after()
    counters = {
        "steps": 4,
        "scheduled_tokens": 60,
        "padded_tokens": 20,
        "bucket_steps": {16: 3, 32: 1},
        "programs": 6,
        "programs_ready": 5,
        "compile_seconds": 1.25,
        "recompiles": 0,
    }
    llm.executor_stats = lambda: counters
    shown = repr(llm.stats())
    assert "4; padded to: 3 of 16, 1 of 32; 25% of the tokens were padding" in shown
    assert "5 of 6 ready, 0 recompiles" in shown
    assert "<table>" in llm.stats()._repr_html_()
