"""`jaxpaged bench serve` and `sweep` as people run them: against the embedded model, over HTTP and gRPC."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import SERVE

pytest.importorskip("httptools", reason="comes with the extra test")
pytest.importorskip("grpc", reason="comes with the extra test")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
SMALL = ["--num-prompts", "4", "--input-len", "20", "--output-len", "6", "--disable-tqdm"]


@pytest.fixture(scope="module")
def places():
    """The URL and the gRPC address of a server."""
    started = subprocess.Popen(
        [*SERVE, "--grpc-port", "0"], cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    lines = []
    for line in started.stderr:
        lines.append(line)
        if found := re.search(r"at (http://\S+) and over gRPC at (\S+)", line):
            yield found.groups()
            started.kill()
            started.communicate()
            return
    raise AssertionError("".join(lines))


def bench(*arguments):
    command = [sys.executable, "-m", "jaxpaged", "bench", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("over", ["openai", "openai-chat", "grpc", "grpc-chat"])
def test_a_served_model_is_measured(over, places, tmp_path):
    place = places[over.startswith("grpc")]
    out = bench(
        "serve",
        "--backend",
        over,
        "--base-url",
        place,
        *SMALL,
        "--request-rate",
        "20",
        "--save-result",
        "--save-detailed",
        "--result-dir",
        str(tmp_path),
    )
    [path] = tmp_path.glob("*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["completed"], found["failed"], found["model_id"]) == (4, 0, "demo")
    assert found["output_lens"] == [6] * 4 and found["total_output_tokens"] == 24
    assert all(length >= 18 for length in found["input_lens"])
    for ttft, itl, latency in zip(found["ttfts"], found["itls"], found["latencies"], strict=True):
        assert 0 < ttft <= latency and ttft + sum(itl) == pytest.approx(latency)
    assert found["duration"] >= 4 / 20 and "Successful requests:                     4" in out


def test_a_sweep_writes_its_table_and_picture(places, tmp_path):
    out = bench(
        "sweep",
        "--base-url",
        places[0],
        *SMALL,
        "--max-concurrencies",
        "1,2",
        "-o",
        str(tmp_path),
        "--experiment-name",
        "x",
    )
    assert "1 at a time" in out and "2 at a time" in out
    assert (tmp_path / "x" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "x").glob("*.json"))) == 2
