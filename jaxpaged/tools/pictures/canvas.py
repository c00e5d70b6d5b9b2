"""matplotlib without its global state: figures, and the colours that all pictures share.

matplotlib belongs to the extra `plots` and is imported when the first picture is drawn.
"""

import importlib.util
import io
from pathlib import Path
from typing import Any

from jaxpaged.errors import UsageError

INSTALL = "Install it: pip install matplotlib."
SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
GREY, PALE, PALE_ORANGE, INK = "#BBBBBB", "#EEEEEE", "#F8DDA0", "#333333"


def check_picture_path(path: str | Path) -> Path:
    """A path that a picture can be written to. Raises UsageError: no matplotlib, unknown suffix, no such folder."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"the picture {path} has the suffix {path.suffix!r}. Use one of {', '.join(SUFFIXES)}.")
    check_folder(path)
    if not has_matplotlib():
        raise UsageError(f"pictures need matplotlib, which is not installed. {INSTALL}")
    return path


def check_folder(path: str | Path) -> Path:
    """A path whose folder exists. Raises UsageError when it does not, or a folder is where the file is to be."""
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder. Choose another path.")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}. Create it, or choose another path.")
    return path


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Any:
    """An empty figure; sizes are inches. No window, no pyplot, nothing shared with the caller's own plots."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def plain_axes(axes: Any) -> None:
    """Few lines: no box, a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.tick_params(labelsize=9, colors=INK)


def write_figure(figure: Any, path: str | Path) -> Path:
    """Write a PNG, SVG or PDF. Raises UsageError when the file cannot be written."""
    path = Path(path)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}. Choose another path.") from None
    return path


def png_bytes(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
