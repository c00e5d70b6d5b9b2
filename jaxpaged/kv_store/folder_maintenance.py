"""What a person does with a folder of pages: see what is in it, check all of it, remove what is old or too much.

An engine may use the folder meanwhile. Nothing here prints.
"""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.errors import ConfigError, PageError
from jaxpaged.kv_store import page_folder
from jaxpaged.kv_store.page import MAX_HEADER_BYTES, MAX_PAGE_BYTES, decode


@dataclass(frozen=True)
class SpaceReport:
    """The pages of one namespace. Times are seconds since the epoch, 0 where there is no page."""

    namespace: str
    num_pages: int
    num_bytes: int
    oldest_use: float
    newest_use: float
    facts: dict[str, Any]


def pages_of(root: Path, spaces: Sequence[str] = ()) -> list[page_folder.PageFile]:
    """The pages of these namespaces, or of all, longest unused first. ConfigError where the folder cannot be read.

    A namespace may be given by its first digits.
    """
    try:
        pages, known = page_folder.all_pages(root), page_folder.spaces(root)
    except OSError as error:
        raise ConfigError(f"{root} cannot be read as a folder of pages: {error.strerror}.") from None
    for space in spaces:
        matches = [name for name in known if name.startswith(space[: page_folder.SPACE_DIGITS])]
        if len(matches) != 1 or not space:
            raise ConfigError(
                f"{space!r} names {len(matches)} namespaces of {root}, which has {', '.join(known) or 'none'}."
            )
    chosen = tuple(space[: page_folder.SPACE_DIGITS] for space in spaces)
    return [page for page in pages if not chosen or page.name.startswith(chosen)]


def reports(root: Path) -> list[SpaceReport]:
    """One line for each namespace, the one used last first."""
    by_space: dict[str, list[page_folder.PageFile]] = defaultdict(list)
    for page in pages_of(root):
        by_space[page.name.partition("/")[0]].append(page)
    found = []
    for space in page_folder.spaces(root):
        pages, said = by_space[space], page_folder.read_config(root, space)
        facts = said.get("facts")
        found.append(
            SpaceReport(
                namespace=str(said.get("namespace", space)),
                num_pages=len(pages),
                num_bytes=sum(page.num_bytes for page in pages),
                oldest_use=pages[0].used_ns / 1e9 if pages else 0.0,
                newest_use=pages[-1].used_ns / 1e9 if pages else 0.0,
                facts=facts if isinstance(facts, dict) else {},
            )
        )
    return sorted(found, key=lambda report: -report.newest_use)


def verify(
    root: Path,
    spaces: Sequence[str] = (),
    secret: bytes | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[int, dict[str, str]]:
    """Read every page and check it whole. How many were right, and what is wrong with each of the others, by name.

    `progress` hears of bytes.
    """
    pages = pages_of(root, spaces)
    total, done, num_right = sum(page.num_bytes for page in pages), 0, 0
    wrong: dict[str, str] = {}
    for page in pages:
        try:
            check(root, page, secret)
            num_right += 1
        except FileNotFoundError:  # an engine removed it meanwhile
            pass
        except (PageError, OSError) as error:
            wrong[page.name] = str(error)
        done += page.num_bytes
        progress(done, total)
    return num_right, wrong


def check(root: Path, page: page_folder.PageFile, secret: bytes | None) -> None:
    """Raise PageError unless the file holds what its name and its namespace say."""
    if page.num_bytes > MAX_PAGE_BYTES + MAX_HEADER_BYTES:
        raise PageError(f"It has {page.num_bytes} bytes, more than any page.")
    content = (root / page.name).read_bytes()
    space, key = page.name.partition("/")[0], page_folder.key_of_file(page.name)
    assert key is not None  # all_pages finds no others
    said = page_folder.read_config(root, space).get("namespace")
    header, _ = decode(content, expect_namespace=said, key=key, secret=secret)
    if not header.namespace.startswith(space):
        raise PageError(f"The page is another's: its namespace is {header.namespace}, not {space}...")


def to_prune(
    pages: Sequence[page_folder.PageFile], max_bytes: int | None, older_than_s: float | None, now: float | None = None
) -> list[page_folder.PageFile]:
    """The pages, longest unused first, that are too old, and those that must go for the rest to fit."""
    oldest_ns = ((now or time.time()) - older_than_s) * 1e9 if older_than_s is not None else 0.0
    remaining, chosen = sum(page.num_bytes for page in pages), []
    for page in pages:
        if page.used_ns < oldest_ns or (max_bytes is not None and remaining > max_bytes):
            chosen.append(page)
            remaining -= page.num_bytes
    return chosen


def remove(root: Path, names: Sequence[str]) -> int:
    """Remove pages, and what killed writers left. How many pages are gone. ConfigError where that is not allowed."""
    removed = 0
    try:
        with page_folder.making_room(root):
            page_folder.remove_leftovers(root)
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(root / name)
                    removed += 1
    except OSError as error:
        raise ConfigError(f"Pages of {root} cannot be removed ({removed} were): {error}.") from None
    return removed
