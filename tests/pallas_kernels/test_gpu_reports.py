"""What XLA's and ptxas's own texts say of a program for a GPU, read from texts made by hand."""

import pytest

from pallas_kernels.gpu_reports import Launches, launches_of, parsed

ONE_GRAPH = """000: kCommandBuffer [source | sink]
   001: kCustomKernel   [source        | next=002 (1) ] norm grid: [1, 1, 1] threads: [32, 1, 1]  shared_memory: 0 bytes
   002: kCublasLtMatmul [prev=001 (1)  | next=003 (1) ] kCublasLtMatmul
   003: kConditional    [prev=002 (1)  | sink         ]
     false_branch:
       004: kCustomKernel [source | sink] limits grid: [64, 1, 1] threads: [256, 1, 1]  shared_memory: 32 bytes
     true_branch:
       005: kCopy [source | sink] kCopy
"""
BROKEN = """000: kCommandBuffer [source | next=002 (1) ]
   001: kCustomKernel   [source | sink] head grid: [1, 1, 1] threads: [32, 1, 1]  shared_memory: 0 bytes
002: kConditional [prev=000 (1) | next=007 (1) ]
  false_branch:
    003: kWhile [source | sink]
      condition:
        004: kCustomKernel [source | sink] more grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
      body:
        005: kCommandBuffer [source | sink]
          006: kCustomKernel [source | sink] search grid: [1, 1, 1] threads: [32, 1, 1]  shared_memory: 0 bytes
  true_branch:
007: kCopy [prev=002 (1) | sink] kCopy
"""
PTXAS = """ptxas info    : (C7510) Potential Performance Loss: products wait for each other
ptxas info    : Compiling entry function 'attend' for 'sm_90a'
ptxas info    : Function properties for attend
    0 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 114 registers, used 1 barriers
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ONE_GRAPH, Launches(graphs=1, singly=0, host_waits=0, launched=4)),
        (BROKEN, Launches(graphs=2, singly=2, host_waits=2, launched=4)),
    ],
)
def test_the_host_waits_for_conditionals_and_loops_outside_of_graphs(text, expected):
    assert launches_of(text) == expected


def test_a_report_of_ptxas_is_read_once(tmp_path):
    path = tmp_path / "report"
    path.write_text(PTXAS, encoding="utf-8")
    (report,) = parsed(path, {"attend": 38912})
    assert (report["kernel"], report["registers"], report["spilled_bytes"]) == ("attend", 114, 16)
    assert report["shared_memory"] == 38912 and report["warnings"] == ["products wait for each other"]
    assert not path.exists()
