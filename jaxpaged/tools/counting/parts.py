"""From which part of jaxpaged the operations of a compiled program come, by the source files that its text names."""

import re

XLA_ITSELF = "XLA's copies and conversions"
PARTS = {
    "few_rows": "products",
    "layers/linear": "products",
    "int4_matmul": "products",
    "grouped_matmul": "experts",
    "sort_by_group": "experts",
    "layers/experts": "experts",
    "attention": "attention",
    "layers/norm": "norms",
    "layers/rope": "rotations",
    "layers/mlp": "activation of the feed-forward",
    "layers/embedding": "embeddings and logits",
    "sampling/": "sampling",
    "worker/": "rows and tables",
    "models/": "the model's own sums",
}
"""Piece of a source file's path -> what it computes, the first that fits."""


def parts_of(hlo_text: str) -> dict[str, str]:
    """Operation of a compiled program -> the part of jaxpaged that it comes from."""
    files = dict(re.findall(r'^(\d+) "(.*)"$', hlo_text.partition("\nFunctionNames")[0], re.MULTILINE))
    locations = dict(re.findall(r"^(\d+) \{file_name_id=(\d+) ", hlo_text, re.MULTILINE))
    frames = {
        frame: (location, str(int(parent) - 1))
        for frame, location, parent in re.findall(
            r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}", hlo_text, re.MULTILINE
        )
    }
    found = {}
    for line in hlo_text.splitlines():
        if named := re.match(r"\s*(?:ROOT )?%?([\w.-]+) = ", line):
            frame = re.search(r"stack_frame_id=(\d+)", line)
            found[named[1]] = part_of_frame(frame[1], frames, locations, files) if frame else XLA_ITSELF
    return found


def part_of_frame(
    frame: str, frames: dict[str, tuple[str, str]], locations: dict[str, str], files: dict[str, str]
) -> str:
    """The part of the innermost frame that is in one."""
    while frame in frames:
        location, frame = frames[frame]
        path = files.get(locations.get(location, ""), "")
        for piece, part in PARTS.items():
            if piece in path.rpartition("site-packages/")[2]:
                return part
    return XLA_ITSELF
