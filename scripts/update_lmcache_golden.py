#!/usr/bin/env python3
"""Record what LMCache's own code says, into tests/golden/lmcache.json: names of chunks, bytes on the wire, and what its
multi-process server is asked.

    scripts/update_lmcache_golden.py [--env FOLDER]

It runs itself in the environment that scripts/lmcache_env.py makes. LMCache takes its hashes from vLLM, which is not
installed there: the three lines that count stand below, with vLLM's names, and everything else is LMCache's.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

from lmcache_env import DEFAULT_ENV, environment

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "lmcache.json"
SEEDS = {"sha256_cbor": (None, "0", "1234"), "builtin": ("0", "1234")}
CHUNK_SIZES = (16, 256)
NUM_TOKENS = 900
MODELS = {"org/model-7B": ("bfloat16", 1), "a": ("float16", 2), "/models/Model_1.5": ("float32", 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", type=Path, default=DEFAULT_ENV, help="environment with LMCache; made when missing")
    parser.add_argument("--inside", nargs=2, metavar=("ALGORITHM", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        algorithm, seed = arguments.inside
        print(json.dumps(recorded(algorithm, seed or None)))
        return
    python = environment(arguments.env)
    said: dict[str, Any] = {"names": []}
    for algorithm, seeds in SEEDS.items():
        for seed in seeds:
            more = {} if seed is None else {"PYTHONHASHSEED": seed}
            kept = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
            done = subprocess.run(
                [python, __file__, "--inside", algorithm, seed or ""],
                env={**kept, **more},
                stdout=subprocess.PIPE,
                check=True,
            )
            last = json.loads(done.stdout.splitlines()[-1])
            said["names"] += last.pop("names")
            said |= last
    GOLDEN.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {GOLDEN}", file=sys.stderr)


def tokens() -> list[int]:
    """The same in the test: small, large, and equal ones."""
    return [(i * i * 7919 + 13 * i) % 151_936 if i % 50 else 0 for i in range(NUM_TOKENS)]


def stand_for_vllm(algorithm: str, seed: str | None) -> None:
    """vLLM's hash functions, and its NONE_HASH, under their names."""
    import cbor2

    def sha256_cbor(value: Any) -> bytes:
        return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()

    def get_hash_fn_by_name(name: str) -> Any:
        if name != "sha256_cbor":
            raise ValueError(name)
        return sha256_cbor

    def init_none_hash(function: Any) -> None:
        utilities.NONE_HASH = function("vllm-none-hash" if seed is None else seed)

    modules = {
        name: types.ModuleType(name) for name in ("vllm", "vllm.utils", "vllm.utils.hashing", "vllm.v1", "vllm.v1.core")
    }
    utilities: Any = types.ModuleType("vllm.v1.core.kv_cache_utils")
    utilities.init_none_hash = init_none_hash
    modules["vllm.utils.hashing"].get_hash_fn_by_name = get_hash_fn_by_name  # type: ignore[attr-defined]
    modules["vllm.v1.core"].kv_cache_utils = utilities  # type: ignore[attr-defined]
    sys.modules |= {**modules, "vllm.v1.core.kv_cache_utils": utilities}


def recorded(algorithm: str, seed: str | None) -> dict[str, Any]:
    """What LMCache says, with this algorithm, in a process that was started with this PYTHONHASHSEED."""
    stand_for_vllm(algorithm, seed)
    import torch
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.token_database import ChunkedTokenDatabase

    names = []
    for chunk_size in CHUNK_SIZES:
        for model, (dtype, world_size) in MODELS.items():
            config = LMCacheEngineConfig.from_defaults(chunk_size=chunk_size, pre_caching_hash_algorithm=algorithm)
            metadata = LMCacheMetadata(
                model_name=model,
                world_size=world_size,
                local_world_size=world_size,
                worker_id=world_size - 1,
                local_worker_id=world_size - 1,
                kv_dtype=getattr(torch, dtype),
                kv_shape=(2, 2, chunk_size, 4, 8),
            )
            database = ChunkedTokenDatabase(config, metadata)
            keys = [key.to_string() for _, end, key in database.process_tokens(tokens()) if end % chunk_size == 0]
            facts = {"algorithm": algorithm, "seed": seed, "chunk_size": chunk_size, "model": model, "dtype": dtype}
            names.append(
                {**facts, "world_size": world_size, "num_names": len(keys), "names": [keys[0], keys[1], keys[-1]]}
            )
    return {"names": names, **wire(), "multiprocess": multiprocess()}


def wire() -> dict[str, Any]:
    """The bytes that LMCache's client, server and Redis connector write."""
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1 import protocol
    from lmcache.v1.memory_management import MemoryFormat

    key = CacheEngineKey("org/model-7B", 2, 1, 0xDEADBEEF, torch.bfloat16)
    shape, dtype, form = torch.Size([2, 3, 256, 32]), torch.bfloat16, MemoryFormat.KV_2LTD
    length = shape.numel() * 2
    protocol.init_remote_metadata_info(1)
    none = torch.Size([0, 0, 0, 0])
    said = {
        "put": protocol.ClientMetaMessage(protocol.ClientCommand.PUT, key, length, form, dtype, shape),
        "get": protocol.ClientMetaMessage(protocol.ClientCommand.GET, key, 0, MemoryFormat(1), torch.float16, none),
        "exist": protocol.ClientMetaMessage(protocol.ClientCommand.EXIST, key, 0, MemoryFormat(1), torch.float16, none),
        "found": protocol.ServerMetaMessage(protocol.ServerReturnCode.SUCCESS, length, form, dtype, shape),
        "not_found": protocol.ServerMetaMessage(
            protocol.ServerReturnCode.FAIL, 0, MemoryFormat(1), torch.float16, none
        ),
        "redis_metadata": protocol.RemoteMetadata(length, [shape], [dtype], form),
    }
    return {
        "name": key.to_string(),
        "shape": list(shape),
        "wire": {name: each.serialize().hex() for name, each in said.items()},
    }


def multiprocess() -> dict[str, Any]:
    """Of messages the fields, as JSON (number, type, whether it is a list, whether it may be unset), and methods."""
    from importlib import import_module

    found: dict[str, Any] = {"messages": {}, "methods": {}}
    for name in ("common", "controller_service", "lookup_service", "engine_driven_service"):
        module = import_module(f"lmcache.v1.multiprocess.transport.grpc_impl._proto_gen.{name}_pb2")
        for message in module.DESCRIPTOR.message_types_by_name.values():
            fields = {
                each.name: [each.number, each.type, each.is_repeated, each.has_presence] for each in message.fields
            }
            found["messages"][message.full_name] = json.dumps(fields)
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                types = f"{method.input_type.full_name} -> {method.output_type.full_name}"
                found["methods"][f"{service.full_name}.{method.name}"] = types
    return found


if __name__ == "__main__":
    main()
