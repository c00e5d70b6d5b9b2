"""Run in LMCache's environment by test_real_lmcache.py: its own token database and connectors put and get chunks.

    lmcache_peer.py put|get < facts.json

The hash algorithm is vLLM's sha256_cbor, which scripts/update_lmcache_golden.py stands in for.
"""

import asyncio
import json
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))


def main():
    facts = json.load(sys.stdin)
    from update_lmcache_golden import stand_for_vllm

    stand_for_vllm("sha256_cbor", None)
    import torch
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.connector import CreateConnector
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from lmcache.v1.token_database import ChunkedTokenDatabase

    _, layers, tokens, hidden = facts["shape"]
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=facts["chunk_size"],
        pre_caching_hash_algorithm="sha256_cbor",
        local_cpu=True,
        max_local_cpu_size=0.1,
        remote_url=facts["url"],
        remote_serde="naive",
    )
    metadata = LMCacheMetadata(
        model_name=facts["model"],
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(layers, 2, tokens, 1, hidden),
    )
    database = ChunkedTokenDatabase(config, metadata)
    keys = [key for _, end, key in database.process_tokens(facts["tokens"]) if end % facts["chunk_size"] == 0]
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    backend = LocalCPUBackend(config, metadata, dst_device="cpu")
    connector = CreateConnector(facts["url"], loop, backend, config, metadata)
    wait = lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)
    if sys.argv[1] == "put":
        chunk = backend.allocate(torch.Size(facts["shape"]), torch.bfloat16, MemoryFormat.KV_2LTD)
        chunk.tensor.view(torch.uint8).copy_(
            torch.frombuffer(bytearray.fromhex(facts["content"]), dtype=torch.uint8).reshape(2, layers, tokens, -1)
        )
        wait(connector.put(keys[facts["number"]], chunk))
        said = {"exists": wait(connector.exists(keys[facts["number"]]))}
    else:
        exists = [wait(connector.exists(key)) for key in keys]
        found = [wait(connector.get(key)) for key, there in zip(keys, exists) if there]
        said = {
            "exists": exists,
            "chunks": [bytes(chunk.byte_array).hex() for chunk in found],
            "shapes": [list(chunk.get_shape()) for chunk in found],
        }
    print("\n" + json.dumps(said), flush=True)
    import os

    os._exit(0)


main()
