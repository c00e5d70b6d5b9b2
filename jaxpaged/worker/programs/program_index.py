"""Which entry of jax's compilation cache a program is, by what it depends on: so that a start traces nothing that an
earlier one has compiled.

jax knows its entries by the text of a program, and to have that costs a second of Python for a dozen layers. Beside its
cache lies a folder for each fingerprint, with a file for each program: the key of the entry, and the record that jax
must have to call it (`executables.py`). A bundle keeps the same, but stands alone. What is missing, damaged, or cannot
be loaded is traced and compiled as if it had never been there.
"""

import contextlib
import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh

from jaxpaged.messages import ProgramKey
from jaxpaged.plugins.loading import plugin_files
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.programs.executables import (
    HIT,
    CacheEntries,
    LoadedProgram,
    ProgramRecord,
    Unstorable,
    load,
    record_of,
)
from jaxpaged.worker.programs.fingerprint import Fingerprint, replaced_code
from pallas_kernels.llvm.calls import calls_in, prepare

logger = logging.getLogger(__name__)

FOLDER = "programs"
FORMAT = 1
HARMLESS = re.compile("cache|logging|log_level|dump|traceback|profile|tracer_errors|transfer_guard")
"""What jax is told that changes no program, in the names of its settings."""


class Entry(msgspec.Struct, frozen=True):
    """`key`: of jax's cache. `kernels`: what the program calls besides itself, by XLA's names."""

    key: str
    kernels: list[str]
    record: ProgramRecord


ENTRIES = msgspec.json.Decoder(Entry)
"""Made at once: several threads load programs, and msgspec (0.22) ends the process where one decodes a type while
another makes its first decoder."""


def open_index(engine_spec: EngineSpec, num_blocks: Sequence[int], node_types: Sequence[type]) -> "ProgramIndex | None":
    """That of an engine's programs beside the cache that jax has; None where there is none.

    An engine of several processes or of stages has programs that cannot be stored one by one, or were never tried so.
    And where functions were replaced, or somebody's logits processors are traced too, the text of a program tells, but
    no fingerprint does.
    """
    folder, draft = jax.config.jax_compilation_cache_dir, engine_spec.draft
    parallel = engine_spec.config.parallel
    stands_alone = engine_spec.stage is None and parallel.num_processes == 1
    if folder is None or not stands_alone or engine_spec.custom.processors:
        return None
    options = engine_spec.config.plugins
    files = plugin_files(options.plugin, options.plugins)
    if replaced := replaced_code(engine_spec.model, *((draft.model,) if draft else ()), plugins=files):
        logger.info("programs are traced at every start, since these functions were replaced: %s", ", ".join(replaced))
        return None
    return ProgramIndex(Path(folder), engine_spec.fingerprint(), num_blocks, engine_spec.mesh, node_types)


def jax_settings() -> list[tuple[str, str]]:
    """Everything that jax can be told, as far as it may change programs."""
    return sorted((name, str(value)) for name, value in jax.config.values.items() if not HARMLESS.search(name))


class ProgramIndex:
    """The programs of one fingerprint and number of KV blocks, on the devices of `mesh`. `folder` is jax's cache."""

    def __init__(
        self, folder: Path, fingerprint: Fingerprint, num_blocks: Sequence[int], mesh: Mesh, node_types: Sequence[type]
    ):
        text = msgspec.json.encode([FORMAT, num_blocks, fingerprint, jax_settings()])
        self._folder = folder / FOLDER / hashlib.sha256(text).hexdigest()[:32]
        self._mesh, self._node_types = mesh, node_types
        self._entries = CacheEntries(mesh.devices.flat[0].client)

    def known(self, keys: Iterable[ProgramKey]) -> frozenset[ProgramKey]:
        """Those of `keys` that were compiled before."""
        return frozenset(key for key in keys if self._path(key).exists())

    def load(self, key: ProgramKey) -> LoadedProgram | None:
        """The program, if it was compiled before and can be loaded."""
        try:
            entry = ENTRIES.decode(self._path(key).read_bytes())
            payload = self._entries.payload(entry.key)
            if payload is None:
                return None  # jax has removed it
            prepare(entry.kernels)
            program = load(payload, entry.record, self._mesh, self._node_types)
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with a file, compiling anew puts it right
            logger.warning("%s of size %d is compiled again: %s cannot be used (%s)", *key, self._path(key), error)
            return None
        jax.monitoring.record_event(HIT)
        return program

    def compile(self, key: ProgramKey, lowered: Any) -> Any:
        """A program, which the next start finds, unless it is one that cannot be stored."""
        compiled, entry = self._entries.compile(lowered)
        if entry is not None and isinstance(compiled, jax.stages.Compiled):
            with contextlib.suppress(Unstorable):
                record = record_of(compiled, self._node_types)
                self._write(key, Entry(entry, self._kernels_of(compiled), record))
        return compiled

    def _kernels_of(self, compiled: jax.stages.Compiled) -> list[str]:
        """Kernels that a process must know before it loads the program, of which only CPUs have any. The text of a
        program is megabytes, and nobody else has the interpreter while XLA writes it: a tenth of a second on GPUs."""
        is_cpu = self._mesh.devices.flat[0].platform == "cpu"
        return sorted(calls_in(compiled.as_text())) if is_cpu else []

    def _path(self, key: ProgramKey) -> Path:
        return self._folder / f"{key.kind}-{key.size}.json"

    def _write(self, key: ProgramKey, entry: Entry) -> None:
        """All of it or nothing: others may read and write the same file. A folder that takes nothing costs time."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")  # as readable as jax's own files
            temporary.write_bytes(msgspec.json.encode(entry))
            os.replace(temporary, path)
