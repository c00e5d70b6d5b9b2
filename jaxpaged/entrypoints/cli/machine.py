"""What this machine has: memory of the host and of its GPUs, found without jax.

Nothing here starts a device: figures come from the operating system and from `nvidia-smi`.
"""

import os
import shutil
import subprocess
from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_memory_bytes() -> int:
    """Memory that this process may use: that of the machine, or of its container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CGROUP_LIMIT.read_text(encoding="utf-8").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def gpus() -> list[tuple[str, int]]:
    """(name, bytes of memory) of every NVIDIA GPU that the driver shows."""
    text = output_of("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    found = []
    for line in text.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdigit():
            found.append((name.strip(), int(mebibytes) * 2**20))
    return found


def num_tpu_chips() -> int:
    """How many TPU chips the operating system shows; their memory only jax knows."""
    return len([*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")])


def output_of(*command: str, timeout: float = 20.0) -> str:
    """What a program prints; empty when it is not there, fails or hangs."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def gibibytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
