"""Run example scripts of a vLLM checkout on jaxpaged: only their imports and their model are changed.

    python scripts/run_vllm_examples.py ~/vllm/examples/basic/offline_inference
    python scripts/run_vllm_examples.py FOLDER --model demo --only chat.py

The files themselves stay as they are; changed copies run in a temporary folder, each in a process of its own.
scripts/vllm_examples/README.md has the results.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jaxpaged

IMPORT = re.compile(r"^from vllm(?:\.[\w.]+)? import (\((?:[^)]*)\)|[^\n]*)", re.MULTILINE)
MODEL = re.compile(r"\bmodel=(\"[^\"]*\"|'[^']*')")
ELSEWHERE = dict.fromkeys(("encode_image_url", "fetch_image"), "jaxpaged.multimodal.image_urls")
"""Names that jaxpaged has in a module of its own."""
STAND_INS = {
    "print_embeddings": "def print_embeddings(values, **_):\n    print(len(values), list(values[:4]))",
    "convert_image_mode": "def convert_image_mode(image, mode):\n    return image.convert(mode)",
    "ImageAsset": """\
class ImageAsset:
    def __init__(self, name):
        from PIL import Image, ImageDraw
        self.pil_image = Image.new("RGB", (320, 320), "white")
        ImageDraw.Draw(self.pil_image).ellipse((60, 60, 200, 200), (220, 40, 40))""",
    **{
        name: f"class {name}:\n    def __init__(self, *_, **__):\n        raise SystemExit('{name}: {why}')"
        for name, why in (
            ("VideoAsset", "the video comes from the network"),
            ("AudioAsset", "audio is not taken"),
        )
    },
}
"""What only prints, or brings vLLM's own pictures from the network, and is no part of its interface: a replacement. The
picture is a red circle on white. The last ones are names of types in examples of many models, and refuse to be made.
"""


def changed(source: str, model: str) -> tuple[str, list[str]]:
    """The script for jaxpaged, and the names that it imports from vLLM and that are not there."""
    missing: list[str] = []

    def new_import(match: re.Match) -> str:
        names = [name.strip() for name in match[1].strip("()").split(",") if name.strip()]
        places = {name: place_of(name.split(" as ")[0]) for name in names}
        missing.extend(name for name in names if places[name] is None and name not in STAND_INS)
        imports = [f"from {place} import {name}" for name, place in places.items() if place is not None]
        return "\n".join([*imports, *(STAND_INS[name] for name in names if places[name] is None and name in STAND_INS)])

    return MODEL.sub(f"model={model!r}", IMPORT.sub(new_import, source)), missing


def place_of(name: str) -> str | None:
    """The module of jaxpaged that has a name; None where there is none."""
    return "jaxpaged" if name in jaxpaged.__all__ else ELSEWHERE.get(name)


def verdict(path: Path, model: str, seconds: float) -> str:
    """`unchanged`, or the reason why the script does not run."""
    source, missing = changed(path.read_text(encoding="utf-8"), model)
    if missing:
        return f"imports {', '.join(missing)}"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_text(source, encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, copy], cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not done after {seconds:g} seconds"
    if done.returncode == 0:
        return "unchanged"
    return next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit status {done.returncode}")


def main() -> int:
    """Returns 1 when a script does not run, so that a checkout can be watched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of scripts")
    parser.add_argument("--model", default="demo", help="the model that all of them use")
    parser.add_argument("--only", action="append", help="the name of a script; may be repeated")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for each")
    args = parser.parse_args()
    paths = [path for path in sorted(args.folder.glob("*.py")) if not args.only or path.name in args.only]
    if not paths:
        parser.error(f"{args.folder} has no such scripts.")
    verdicts = []
    for path in paths:
        verdicts.append(verdict(path, args.model, args.timeout))
        print(f"{path.name}: {verdicts[-1]}", flush=True)
    return int(any(each != "unchanged" for each in verdicts))


if __name__ == "__main__":
    sys.exit(main())
