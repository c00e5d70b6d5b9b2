"""What runs by default, and what is left out."""

from offline_bench import plan


def test_the_default_leaves_the_slow_things_out_and_says_so(tmp_path):
    made = plan.make_plan(["qwen3-0.6b"], None, ["transformers"], [""], tmp_path)
    ours, peer = made.engines
    assert "mixed" not in made.workloads["qwen3-0.6b"]
    assert made.names(ours, "qwen3-0.6b", 1) == ("single", "prefill-1k", "shared")
    assert made.names(peer, "qwen3-0.6b", 0) == ("single", "prefill-1k")
    assert made.names(peer, "qwen3-0.6b", 1) == ()
    assert "mixed" in made.left_out[0]
    assert "--setup-peers transformers" in peer.missing


def test_what_is_asked_for_runs_in_every_round(tmp_path):
    made = plan.make_plan(["qwen3-0.6b"], ["long"], ["transformers"], ["--max-num-seqs 8", ""], tmp_path)
    assert [made.names(engine, "qwen3-0.6b", 1) for engine in made.engines] == [("long",)] * 3
    assert made.engines[0].flags == ("--max-num-seqs", "8")
    assert made.left_out == ()
