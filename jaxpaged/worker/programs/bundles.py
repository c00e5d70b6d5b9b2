"""A bundle: a folder with every compiled program of an engine, so that the next start compiles nothing.

    fingerprint.json    what the programs depend on, and the digest of programs.json; written last
    programs.json       the number of KV blocks and, for every program, its file, digest and record
    forward-64.xla ...  machine code

Programs are made for a number of KV blocks, so the engine takes it from the bundle. Everything in the folder is plain
values and machine code; nothing is unpickled. This module knows files, not what programs compute.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from jax.sharding import Mesh

from jaxpaged.errors import ConfigError, UsageError
from jaxpaged.messages import ProgramKey, Progress
from jaxpaged.worker.programs.executables import LoadedProgram, ProgramRecord, Unstorable, load, store
from jaxpaged.worker.programs.fingerprint import Fingerprint, difference
from pallas_kernels.llvm.calls import calls_in, prepare

FORMAT = 2
FINGERPRINT, PROGRAMS = "fingerprint.json", "programs.json"
AGAIN = "Make it again: jaxpaged compile MODEL -o FOLDER, with the options of this engine."


class StoredProgram(msgspec.Struct, frozen=True):
    """A program of a bundle. `digest` is the SHA-256 of its machine code."""

    kind: str
    size: int
    file: str
    digest: str
    record: ProgramRecord


class Manifest(msgspec.Struct, frozen=True):
    """`kernels`: what the programs call besides themselves, by XLA's names."""

    num_blocks: int
    programs: list[StoredProgram]
    kernels: list[str]


class Label(msgspec.Struct, frozen=True):
    """What is read first. `digest` is the SHA-256 of programs.json."""

    format: int
    digest: str
    fingerprint: Fingerprint


# ---- writing -------------------------------------------------------------------------------------


def save_bundle(
    folder: Path,
    programs: Mapping[ProgramKey, Any],
    fingerprint: Fingerprint,
    num_blocks: int,
    node_types: Sequence[type],
    progress: Progress,
) -> None:
    """Write compiled programs to an empty folder. Raises UsageError when it cannot be written or they not stored."""
    stored, kernels = [], set()
    for key, program in programs.items():
        progress("bundle", len(stored), len(programs))
        try:
            code, record = store(program, node_types)
        except Unstorable as error:
            raise UsageError(f"the engine cannot be stored as a bundle: {error}.") from None
        file = f"{key.kind}-{key.size}.xla" if key.size else f"{key.kind}.xla"
        write(folder / file, code)
        stored.append(StoredProgram(key.kind, key.size, file, sha256(code), record))
        kernels |= calls_in(program.as_text())
    manifest = msgspec.json.encode(Manifest(num_blocks, stored, sorted(kernels)))
    write(folder / PROGRAMS, manifest)
    # Last: a folder with this file is complete.
    label = msgspec.json.encode(Label(FORMAT, sha256(manifest), fingerprint))
    write(folder / FINGERPRINT, msgspec.json.format(label))


def write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {path} ({len(data)} bytes): {error.strerror}. Choose another folder.") from None


# ---- reading -------------------------------------------------------------------------------------


class Bundle:
    """An opened bundle whose files are whole. Raises ConfigError for anything that is not one."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / FINGERPRINT).exists():
            raise ConfigError(f"bundle {folder} has no {FINGERPRINT}: it is no bundle, or was not finished. {AGAIN}")
        label = decoded(folder / FINGERPRINT, read(folder / FINGERPRINT), Label)
        if label.format != FORMAT:
            raise ConfigError(f"bundle {folder} has format {label.format}; this version reads {FORMAT}. {AGAIN}")
        self.fingerprint = label.fingerprint
        manifest = checked(folder / PROGRAMS, label.digest)
        self.manifest = decoded(folder / PROGRAMS, manifest, Manifest)
        # All of them at once: a damaged file must not be found by the first long prompt.
        for program in self.manifest.programs:
            checked(self.path(program), program.digest)

    @property
    def num_blocks(self) -> int:
        return self.manifest.num_blocks

    def check(self, fingerprint: Fingerprint) -> None:
        """Raise ConfigError, naming the first field that differs and both values, if it is for another engine."""
        self._compare(self.fingerprint, fingerprint)

    def _compare(self, there: Fingerprint, here: Fingerprint) -> None:
        if found := difference(there, here):
            raise ConfigError(f"bundle {self.folder} is stale: {found}. {AGAIN} Or start without --bundle.")

    def loaders(
        self, keys: Sequence[ProgramKey], mesh: Mesh, node_types: Sequence[type]
    ) -> dict[ProgramKey, Callable[[], LoadedProgram]]:
        """How to load every program onto the devices of `mesh`. Raises ConfigError unless these are just `keys`, and
        this machine has the kernels that they call."""
        try:
            prepare(self.manifest.kernels)
        except ValueError as error:
            raise ConfigError(f"bundle {self.folder} cannot be used: {error}. {AGAIN}") from None
        stored = [(program.kind, program.size) for program in self.manifest.programs]
        self._compare({"programs": names_of(stored)}, {"programs": names_of(keys)})
        return {
            ProgramKey(program.kind, program.size): partial(self.load, program, mesh, node_types)
            for program in self.manifest.programs
        }

    def load(self, program: StoredProgram, mesh: Mesh, node_types: Sequence[type]) -> LoadedProgram:
        path = self.path(program)
        try:
            return load(read(path), program.record, mesh, node_types)
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError(f"{path} cannot be loaded: {error}. {AGAIN}") from error

    def path(self, program: StoredProgram) -> Path:
        # The name alone: a manifest must not lead out of its folder.
        return self.folder / Path(program.file).name


def names_of(keys: Sequence[tuple[str, int]]) -> list[str]:
    return sorted(f"{kind}-{size}" for kind, size in keys)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: the bundle is not whole. {AGAIN}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Check --bundle.") from None


def checked(path: Path, digest: str) -> bytes:
    data = read(path)
    if sha256(data) != digest:
        raise ConfigError(f"{path} is damaged: its {len(data)} bytes are not those that were written. {AGAIN}")
    return data


def decoded(path: Path, data: bytes, cls: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=cls)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is damaged: {error}. {AGAIN}") from None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
