"""`--timeline`, `--trace` and `--step-log`: files about the steps of a command, written when it ends."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # --help must not wait for numpy
    from jaxpaged.entrypoints.cli.engine import Engine


def add_recording_flags(parser: Any) -> None:
    group = parser.add_argument_group("recordings")
    group.add_argument("--timeline", metavar="FILE", help="draw where the time of the steps went: a .png, .svg or .pdf")
    group.add_argument("--trace", metavar="FILE", help="write the steps as a Chrome trace (JSON, for ui.perfetto.dev)")
    group.add_argument("--step-log", metavar="FILE", help="write the steps as JSON lines, for jaxpaged buckets fit")


def check_recordings(args: argparse.Namespace) -> None:
    """Find what would fail at the end before anything is computed. Raises UsageError."""
    from jaxpaged.entrypoints.pictures.canvas import check_folder, check_picture_path

    if args.timeline:
        check_picture_path(args.timeline)
    for path in filter(None, (args.trace, args.step_log)):
        check_folder(path)


def write_recordings(args: argparse.Namespace, engine: "Engine") -> None:
    """Write the files that were asked for. Raises UsageError when one cannot be written."""
    if not (args.timeline or args.trace or args.step_log):
        return
    from jaxpaged.entrypoints.pictures.timeline import Timeline

    records, num_dropped = engine.step_records()
    timeline = Timeline(records, num_dropped, engine.executor_stats().get("token_buckets", ()))
    if args.timeline:
        timeline.save(args.timeline)
    if args.trace:
        timeline.save_trace(args.trace)
    if args.step_log:
        timeline.save_log(args.step_log)
