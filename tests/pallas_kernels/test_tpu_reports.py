"""The schedule of a TPU's kernel, read from a text made by hand."""

from pallas_kernels.tpu_reports import Schedule, schedule_of, schedules_of

BUNDLES = """= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = smov 7 }
   0x1 LB: > { %s2 = sst [smem:[#allocation43_spill]] %s3 }
   0x2   : > { %s4 = smov 1 }
   0x3 LB: >> { %s5 = sld [smem:[#allocation43_spill]] }
   0x4   : >> { %s6 = vmatmul %s5 }
   0x5 LB: > { BoundsCheck %s7 }
   0x6   :  { %s8 = smov 2 }
"""
EXPECTED = Schedule("attend", 7, 2, 1, ((1, 4, 2), (2, 2, 1), (1, 1, 0)))


def test_loops_have_their_bundles_and_spills_with_those_inside():
    assert schedule_of("attend", BUNDLES) == EXPECTED


def test_a_bundle_without_instructions_ends_no_loop():
    text = BUNDLES.replace("   0x4   : >>", "  0x4a   :  {}\n   0x4   : >>")
    assert schedule_of("attend", text) == Schedule("attend", 8, 2, 1, ((1, 5, 2), (2, 3, 1), (1, 1, 0)))


def test_kernels_of_a_dump_are_told_by_name_and_everything_is_removed(tmp_path):
    for name in (
        "attend.1-71-final_bundles",
        "attend.1-70-schedule-analysis_final_bundles",
        "fusion.2-71-final_bundles",
    ):
        (tmp_path / f"17-{name}.txt").write_text(BUNDLES, encoding="utf-8")
    assert list(schedules_of(tmp_path, {"attend"})) == [EXPECTED]
    assert not list(tmp_path.iterdir())
