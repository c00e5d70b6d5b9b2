"""From LLVM IR to machine code that XLA calls: compiled in this process for its CPU, and kept on disk.

Code lies in the folder `cpu-kernels` of jax's compilation cache, if that is on, under a digest of all that it depends
on: the sources of what emits it, not the IR itself, since writing that takes 50 ms for each kernel, in every start. A
file that is damaged is made again. It is machine code, as jax's own files there are: who may write to that folder may
decide what runs.
"""

import ctypes
import functools
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.llvm.machine import Machine, ffi_version

FOLDER = "cpu-kernels"
PREFIX = "pallas_kernels"
"""Of what XLA calls our kernels."""
USES = {"grouped_matmul": ("few_rows_matmul",), "lora_matmul": ("few_rows_matmul", "grouped_matmul")}
"""Ops whose kernels are made of what others have."""
_DIGEST_BYTES = 32
_ONE_AT_A_TIME = threading.Lock()


def register(op: str, emit: Callable[..., Any], *arguments: str | int, machine: Machine) -> str:
    """Make a kernel known to XLA's CPU clients, once in a process, and return what they call it.

    `emit(*arguments, machine)` -> its module of LLVM IR, which follows from the arguments and from the sources of this
    package, of `llvm` and of the op. The name has a digest of these and of the machine, since compiled programs that
    call it are stored and may outlive it.
    """
    with _ONE_AT_A_TIME:  # programs are traced by several threads
        return _registered(op, emit, arguments, machine).target


@functools.cache
def _registered(op: str, emit: Callable[..., Any], arguments: tuple[str | int, ...], machine: Machine) -> "_Loaded":
    name = ".".join([PREFIX, op, *map(str, arguments)])
    identity = f"{name} {sources_digest(op)}"
    target = f"{name}.{digest_of(identity, machine)[:12]}"
    code = machine_code(identity, lambda: str(emit(*arguments, machine)), machine, code_folder())
    loaded = _Loaded(target, code, machine)
    jax.ffi.register_ffi_target(loaded.target, loaded.capsule(), platform="cpu", api_version=1)
    return loaded


class _Loaded:
    """Machine code in memory. It must outlive every program that calls it."""

    def __init__(self, target: str, code: bytes, machine: Machine):
        import llvmlite.binding as llvm

        from pallas_kernels.llvm.xla_ffi import HANDLER

        self.target = target
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(machine))
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self._address = self._engine.get_function_address(HANDLER)

    def capsule(self) -> Any:
        """The handler's address as Python's C interface passes them."""
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(self._address, None, None)


@functools.cache
def sources_digest(op: str, package: Path = Path(__file__).parents[1]) -> str:
    """Of all from which an op's kernels for CPUs are made."""
    ops = [package / name for name in (op, *USES.get(op, ()))]
    folders = (package, package / "llvm", *ops, *(folder / "cpu" for folder in ops))
    digest = hashlib.sha256()
    for path in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        digest.update(f"{path.relative_to(package)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def machine_code(identity: str, ir_text: Callable[[], str], machine: Machine, folder: Path | None) -> bytes:
    """The object file of a module, from `folder` or compiled and left there. The IR follows from `identity` and from
    the version of XLA's interface: a jaxlib with an older one refuses it."""
    import llvmlite
    import llvmlite.binding as llvm

    key = digest_of(identity, machine, llvmlite.__version__, str(llvm.llvm_version_info), str(ffi_version()))
    path = None if folder is None else folder / f"{key}.o"
    code = None if path is None else _read(path)
    if code is None:
        code = _compile(ir_text(), machine)
        if path is not None:
            _write(path, code)
    return code


def digest_of(identity: str, machine: Machine, *others: str) -> str:
    return hashlib.sha256("\0".join((identity, machine.name, machine.features, *others)).encode()).hexdigest()


def code_folder() -> Path | None:
    """Where code is kept; None where jax keeps no programs."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) / FOLDER if folder and jax.config.jax_enable_compilation_cache else None


def _compile(ir_text: str, machine: Machine) -> bytes:
    import llvmlite.binding as llvm

    target_machine = _target_machine(machine)
    module = llvm.parse_assembly(ir_text)
    module.verify()
    passes = llvm.create_pass_builder(target_machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    return target_machine.emit_object(module)


def _target_machine(machine: Machine) -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=machine.name, features=machine.features, opt=3, jit=True)


def _read(path: Path) -> bytes | None:
    """What `_write` wrote, or None for what is not there or not whole."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """All of it or nothing: others may read and write the same file. A folder that takes nothing costs time only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    except OSError:
        return
