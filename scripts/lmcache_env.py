#!/usr/bin/env python3
"""Make an environment of its own with LMCache, its servers and CPU torch, and print its Python.

    scripts/lmcache_env.py [FOLDER]

It needs Python 3.11, the network and 2 GB. Tests against real servers of LMCache run where it exists, and are skipped
elsewhere; `scripts/update_lmcache_golden.py` records in it what LMCache's own code says.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

DEFAULT_ENV = Path.home() / ".cache" / "jaxpaged" / "lmcache-env"
"""Wherever caches are: tests, which look for it there, have caches of their own."""
LMCACHE = "lmcache==0.5.6"
TORCH = "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# What its servers and connectors import; it asks for CUDA packages besides, which are left out.
PACKAGES = [
    "numpy<2.3",
    "numba",
    "pyyaml",
    "msgspec",
    "pyzmq",
    "psutil",
    "py-cpuinfo",
    "aiohttp",
    "aiofile",
    "aiofiles",
    "safetensors",
    "transformers",
    "redis",
    "requests",
    "sortedcontainers",
    "blake3",
    "xxhash",
    "cbor2",
    "fastapi",
    "uvicorn",
    "httptools",
    "httpx",
    "cachetools",
    "cryptography",
    "grpcio",
    "protobuf<7",
    "opentelemetry-api==1.40.0",
    "opentelemetry-sdk==1.40.0",
    "opentelemetry-exporter-prometheus==0.61b0",
    "opentelemetry-exporter-otlp==1.40.0",
    "prometheus_client==0.24.1",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_ENV)
    print(environment(parser.parse_args().folder))


def environment(folder: Path) -> Path:
    """The Python of an environment in which LMCache can be imported; made when there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder} with {LMCACHE}", file=sys.stderr)
        subprocess.run([base_python(), "-m", "venv", folder], check=True)
    if subprocess.run([python, "-c", "import lmcache.v1.protocol"], capture_output=True).returncode:
        pip = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "--extra-index-url", TORCH_INDEX, TORCH], check=True)
        subprocess.run([*pip, "--no-deps", LMCACHE], check=True)
        subprocess.run([*pip, *PACKAGES], check=True)
    return python


def base_python() -> str:
    """A Python 3.11, from the path or from pyenv: LMCache's wheels and torch's are for it."""
    pyenv = sorted(Path.home().glob(".pyenv/versions/3.11.*/bin/python"))
    for found in (shutil.which("python3.11"), *map(str, pyenv)):
        if found and subprocess.run([found, "-c", "import venv"], capture_output=True).returncode == 0:
            return found
    sys.exit("LMCache's environment needs Python 3.11, which is not on the path.")


if __name__ == "__main__":
    main()
