"""Machine code on disk, the names of kernels, and what stands in their way."""

import re

import pytest

from pallas_kernels import backends
from pallas_kernels.few_rows_matmul import cpu
from pallas_kernels.llvm import code, machine
from pallas_kernels.llvm.calls import calls_in, prepare
from pallas_kernels.llvm.machine import Machine, this_machine, why_not

needs_kernels = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
IR = "define i64 @handler(i64 %x) {\n  %y = add i64 %x, 1\n  ret i64 %y\n}\n"


def make(folder, ir=IR, name="one", cpu=None):
    return code.machine_code(name, lambda: ir, cpu or this_machine(), folder)


@needs_kernels
def test_code_is_compiled_once_for_a_machine_and_made_again_where_a_file_is_damaged(tmp_path, monkeypatch):
    folder = tmp_path / "new" / code.FOLDER
    first = make(folder)
    (file,) = folder.iterdir()
    assert first.startswith(b"\x7fELF") or first
    file.write_bytes(file.read_bytes()[:32] + first)  # the same, written by hand
    assert make(folder) == first
    for damaged in (b"", file.read_bytes()[:-1], bytes(32) + first):
        file.write_bytes(damaged)
        assert make(folder) == first
        assert file.read_bytes()[32:] == first, "the file was not written again"
    make(folder, cpu=Machine("haswell", "+avx2,+fma", 8, 16))
    make(folder, IR.replace("1", "2"), "two")
    assert len(list(folder.iterdir())) == 3
    monkeypatch.setattr(code, "ffi_version", lambda: (0, 1))  # another jaxlib, over the same folder
    make(folder, IR.replace("1", "3"))
    assert len(list(folder.iterdir())) == 4


@needs_kernels
def test_a_stored_file_is_used_and_a_folder_that_takes_nothing_costs_time_only(tmp_path, monkeypatch):
    first = make(tmp_path)
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert make(tmp_path / "file" / "below") == first
    monkeypatch.delattr(code, "_compile")
    assert make(tmp_path) == first


def test_what_a_kernel_is_made_of_decides_about_its_digest(tmp_path):
    digest_of = code.sources_digest.__wrapped__
    for name in ("shapes.py", "llvm/builder.py", "op/cases.py", "op/cpu/tiles.py", "other/cpu/tiles.py", "op/tpu/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    known = {digest_of("op", tmp_path)}
    for name in ("shapes.py", "llvm/builder.py", "op/cases.py", "op/cpu/tiles.py"):
        (tmp_path / name).write_text("changed", encoding="utf-8")
        assert digest_of("op", tmp_path) not in known
        known.add(digest_of("op", tmp_path))
    for name in ("other/cpu/tiles.py", "op/tpu/a.py"):
        (tmp_path / name).write_text("changed", encoding="utf-8")
    assert digest_of("op", tmp_path) in known


@needs_kernels
def test_a_kernel_whose_code_is_kept_is_not_emitted_again(tmp_path, monkeypatch):
    monkeypatch.setattr(code, "code_folder", lambda: tmp_path)
    emitted = []
    emit = lambda *arguments: emitted.append(arguments) or cpu._emit_tiles("bfloat16", 2, arguments[-1])
    for _ in range(2):
        monkeypatch.setattr(code.jax.ffi, "register_ffi_target", lambda *_, **__: None)
        code._registered.__wrapped__("few_rows_matmul", emit, ("one",), this_machine())
    assert len(emitted) == 1


@needs_kernels
def test_stored_names_make_the_same_kernels_known_again():
    name = cpu.kernel("bfloat16", 2, machine=this_machine())
    text = f'%x = f32[2,8] custom-call(%a, %b), custom_call_target="{name}", %y = custom_call_target="__onednn"'
    assert calls_in(text) == {name}
    prepare(calls_in(text))
    digest = name.rsplit(".", 1)[1]
    for wrong, message in (
        (name.replace(digest, "0" * 12), "it is pallas_kernels.few_rows_matmul.bfloat16.2"),
        (name.replace("few_rows", "os"), "no op has it"),
        (name.replace("few_rows_matmul", "llvm"), "no op has it"),
        (name.replace(".2.", ".99."), "no kernel for 99 rows of bfloat16"),
        (name.replace(".2.", ".two."), "no kernel for two rows of bfloat16"),
        (name.replace(".2.", "."), "missing 1 required"),
        ("pallas_kernels", "no op has it"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare([wrong])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda patch: patch.setattr(machine.importlib.util, "find_spec", lambda name: None), "llvmlite is not there"),
        (lambda patch: patch.setattr(machine, "ffi_version", lambda: (1, 0)), r"interface has version \(1, 0\)"),
        (lambda patch: patch.setattr(machine, "KNOWN_LLVM", (14,)), "llvmlite has LLVM"),
        (lambda patch: patch.setattr(machine.os, "name", "nt"), "POSIX"),
    ],
    ids=["no llvmlite", "another interface", "another LLVM", "another system"],
)
def test_what_stands_in_the_way_of_kernels_is_told(monkeypatch, change, message):
    if "LLVM" in message and why_not() is not None:
        pytest.skip(why_not())
    with monkeypatch.context() as patch:
        change(patch)
        reason = machine.why_not.__wrapped__()
        patch.setattr(backends, "why_not", lambda: reason)
        found = backends.refusals("few_rows_matmul", ("reference", "cpu"), "cpu")
    assert found["reference"] is None and re.search(message, found["cpu"])
