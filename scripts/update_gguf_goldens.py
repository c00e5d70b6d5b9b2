#!/usr/bin/env python3
"""Record what llama.cpp makes of GGUF's types of weights, into tests/golden/formats/gguf_weights.npz.

    scripts/update_gguf_goldens.py [--env FOLDER]

For each type, some rows are packed by ggml's C functions and decoded by them: TYPE/rows are the bytes, TYPE/weight
the weights. The library comes with the package xllamacpp. Runs itself in the environment of update_format_goldens.py.
"""

import argparse
import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

from update_format_goldens import GOLDEN, OWN_ENV, own_environment

DEQUANTIZE = {
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
    "Q5_0": "q5_0",
    "Q5_1": "q5_1",
    "Q8_0": "q8_0",
    "Q2_K": "q2_K",
    "Q3_K": "q3_K",
    "Q4_K": "q4_K",
    "Q5_K": "q5_K",
    "Q6_K": "q6_K",
    "IQ4_NL": "iq4_nl",
    "IQ4_XS": "iq4_xs",
    "MXFP4": "mxfp4",
}
INPUTS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", type=Path, default=OWN_ENV, help="environment with the libraries; made when missing")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        record_weights()
        return
    python = own_environment(arguments.env)
    sys.exit(subprocess.run([python, __file__, "--inside"]).returncode)


def ggml() -> ctypes.CDLL:
    """llama.cpp's library, whose functions xllamacpp exports."""
    import xllamacpp

    return ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))


def record_weights() -> None:
    import gguf
    import numpy as np

    library, made = ggml(), {}
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    weight = test_rows(np)
    for name, suffix in DEQUANTIZE.items():
        kind = gguf.GGMLQuantizationType[name]
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows = np.zeros((len(weight), INPUTS // block * num_bytes), np.uint8)
        sizes = (ctypes.c_int64(size) for size in (0, len(weight), INPUTS))
        written = library.ggml_quantize_chunk(int(kind), pointer(weight), pointer(rows), *sizes, None)
        assert written == rows.nbytes, (name, written)
        out = np.empty_like(weight)
        dequantize = getattr(library, f"dequantize_row_{suffix}")
        dequantize(pointer(rows), pointer(out), ctypes.c_int64(weight.size))
        error = float(np.sqrt(((out - weight)[:3] ** 2).mean() / (weight[:3] ** 2).mean()))
        print(f"{name:8} relative error {error:.4f}")
        made[f"{name}/rows"], made[f"{name}/weight"] = rows, out
    np.savez_compressed(GOLDEN / "gguf_weights.npz", **made)


def test_rows(np: Any) -> Any:
    """float32 [6, INPUTS]: common weights, outliers, zeros, and rows that are nothing but a minimum or nearly so."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((6, INPUTS)) * 0.02
    rows[1] += 0.03
    rows[2] *= np.exp(random.standard_normal(INPUTS))
    rows[3] = 0
    rows[4] = -0.25
    rows[5] = np.where(np.arange(INPUTS) % 256 < 128, -0.5, random.standard_normal(INPUTS) * 1e-4)
    return rows.astype(np.float32)


def pointer(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


if __name__ == "__main__":
    main()
