"""What the table of first tokens says of where a tier begins to pay."""

import importlib

import pytest


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("bench_kv_transfer")


def test_a_tier_pays_from_where_it_is_sooner_than_computing(script):
    computed = {64: 0.010, 512: 0.100, 2048: 0.400}
    assert script.pays_from(computed, {64: 0.005, 512: 0.2, 2048: 0.2}) == "64 or less"
    assert script.pays_from(computed, {64: 0.030, 512: 0.060, 2048: 0.2}) == "213", "a third of the way to 512"
    assert script.pays_from(computed, {64: 0.030, 512: 0.120, 2048: 0.220}) == "666"
    assert script.pays_from(computed, dict.fromkeys(computed, 1.0)) == "not up to 2,048"


def test_the_table_has_a_row_for_each_way_and_no_claim_for_those_that_compute(script):
    rows = {"computed": {64: 0.01, 512: 0.1}, "Redis": {64: 0.02, 512: 0.05}, "at least, to copy": {64: 0.0, 512: 0.1}}
    head, _, computed, redis, bound = script.table_of(rows).splitlines()
    assert head.endswith("| 64 tokens | 512 tokens | pays from |") and redis == "| Redis | 20.0 | 50.0 | 139 |"
    assert computed == "| computed | 10.0 | 100.0 |  |" and bound.endswith("| 0.0 | 100.0 |  |")


def test_prefixes_have_the_tokens_that_are_said_and_one_more_and_differ(script):
    prompts = [script.prompt_of(64, number)["prompt_token_ids"] for number in (0, 1, 1900)]
    assert [len(prompt) for prompt in prompts] == [65] * 3 and len({tuple(prompt[:2]) for prompt in prompts}) == 3
