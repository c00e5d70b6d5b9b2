"""The command `jaxpaged` of a guide: `serve` and `proxy` go on in the background once they are ready.

The same server stays when it is asked for again; another one on its port takes its place. Each is kept as a file of
JSON below $GUIDE_SERVERS: its process group, its arguments, its log.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

READY_SECONDS, STOP_SECONDS = 300, 20


def stop(kept: Path) -> None:
    """End a server, and then what it left."""
    group = json.loads(kept.read_text(encoding="utf-8"))["group"]
    kept.unlink()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS
        while is_running(group) and time.monotonic() < end:
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:  # of another process of this kind
        state = Path(f"/proc/{pid}/stat")
        return state.exists() and state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


def serve(arguments: list[str], servers: Path) -> None:
    if "--port" not in arguments:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        arguments = [*arguments[:end], "--port", os.environ["GUIDE_PORT"], *arguments[end:]]
    port = arguments[arguments.index("--port") + 1]
    kept, log = servers / f"{port}.json", servers / f"{port}.log"
    if kept.exists():
        before = json.loads(kept.read_text(encoding="utf-8"))
        if before["arguments"] == arguments and is_running(before["group"]):
            return
        stop(kept)
    with log.open("w", encoding="utf-8") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "jaxpaged", *arguments], stdout=output, stderr=output, start_new_session=True
        )
    kept.write_text(json.dumps({"group": server.pid, "arguments": arguments}), encoding="utf-8")
    for _ in range(READY_SECONDS * 5):
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    sys.exit(f"the server is not ready:\n{log.read_text(encoding='utf-8')[-4000:]}")


def main(arguments: list[str]) -> None:
    if arguments[0] in ("serve", "proxy"):
        serve(arguments, Path(os.environ["GUIDE_SERVERS"]))
        return
    if arguments[:2] in (["bench", "serve"], ["bench", "sweep"]):
        arguments = [*arguments, "--port", os.environ["GUIDE_PORT"]]
    os.execv(sys.executable, [sys.executable, "-m", "jaxpaged", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
