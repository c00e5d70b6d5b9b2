"""One engine on the embedded model for the whole session: compiling is most of what an engine costs here. And servers
as people start them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxpaged import LLM
from jaxpaged.errors import RequestError


class BanBelow:
    """A custom logits processor: tokens below `extra_args["ban_below"]` are never drawn."""

    num_params = 1

    def params_of(self, params):
        wanted = (params.extra_args or {}).get("ban_below")
        if wanted is None:
            return None
        if not isinstance(wanted, int):
            raise RequestError(f"ban_below is {wanted!r}; it must be a token id.", "extra_args")
        return [float(wanted)]

    def apply(self, logits_V, params_P):
        return jnp.where(jnp.arange(len(logits_V)) < params_P[0], -jnp.inf, logits_V)


# Small enough that ordinary prompts take several chunks and that a batch of 64 waits for rows.
OPTIONS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "token_buckets": (2, 8, 128),
    "max_model_len": 2560,
    "block_size": 16,
    "logits_processors": (BanBelow,),
    "num_gpu_blocks_override": 8 * 160 + 1,  # what a CPU takes by itself; a GPU would take all that its memory holds
}
# Servers have the same options, so that all but the first find their programs in the cache.
SERVE = (
    sys.executable,
    "-m",
    "jaxpaged",
    "serve",
    "--port",
    "0",
    "--max-num-seqs",
    "4",
    "--max-num-batched-tokens",
    "64",
    "--token-buckets",
    "2,8,64",
)


def started(*command, pattern=r"served at (http://\S+)"):
    """A process, and the addresses that it says it serves at: the groups of `pattern`."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, stderr=subprocess.PIPE, text=True
    )
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(pattern, line):
            return process, [address.rstrip(".,") for address in found.groups()]
    raise AssertionError(f"{command} did not start: {''.join(lines)}")


def stop(process):
    process.kill()
    process.communicate()


@pytest.fixture(scope="session")
def llm():
    with LLM("demo", **OPTIONS) as engine:
        yield engine
