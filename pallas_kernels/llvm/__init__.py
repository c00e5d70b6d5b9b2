"""Kernels for CPUs: LLVM IR written from Python, compiled in this process, called by XLA.

    machine.py    what this CPU has that kernels need, and why there may be no kernels here
    builder.py    LLVM's builder with what every kernel writes
    xla_ffi.py    the frame in which XLA calls, its thread pool, and a handler around a kernel's pieces
    row_tiles.py  how products of rows with a weight are cut into chunks and tiles
    code.py       IR to machine code, kept on disk, made known to XLA

An op's kernels are functions that emit IR; `code.register` makes one known under a name that says what it is and which
IR it was made of, so that a compiled program which calls it finds in another process just that, or nothing. Nothing
here knows an op. llvmlite (the extra `cpu`) is imported when the first kernel is made.
"""
