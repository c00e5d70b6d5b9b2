"""Run in LMCache's environment by test_real_multiprocess.py: its own client for engines puts and gets what vLLM has.

    multiprocess_peer.py put|get < facts.json

Keys and values are in blocks as vLLM has them, in no order; LMCache gathers chunks from them, and scatters them.
"""

import json
import sys

import torch
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext
from lmcache.v1.multiprocess.transport.grpc_impl.client import GrpcMultiprocessClient


def main():
    facts = json.load(sys.stdin)
    layers, _, num_tokens, heads, dim = facts["shape"]
    block, size = facts["block_size"], facts["chunk_size"]
    num_blocks = num_tokens // block
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    caches = {f"layers.{i}": torch.zeros(2, num_blocks, block, heads, dim, dtype=torch.bfloat16) for i in range(layers)}
    client = GrpcMultiprocessClient(facts["url"])
    context = EngineDrivenTransferContext(instance_id=7, req_client=client)
    context.register(caches, facts["model"], 1, size // block, 30.0, layout_hints={"kv_layout": "NHD"})
    assert type(context.engine_driven_context).__name__ == "EngineDrivenContextShm"

    def key(worker, start, end):
        return IPCCacheServerKey(
            facts["model"], 1, worker, tuple(facts["tokens"]), start, end, request_id="peer", num_kv_readers=1
        )

    found = 0
    if sys.argv[1] == "put":
        content = torch.frombuffer(bytearray.fromhex(facts["content"]), dtype=torch.bfloat16).reshape(facts["shape"])
        for cache, layer in zip(caches.values(), content):
            cache[:, order] = layer.reshape(2, num_blocks, block, heads, dim)
        stored = context.submit_store("peer", key(0, 0, num_tokens), caches, [order], None, size // block)
        assert stored.result(timeout=30)
    else:
        client.lookup(key(None, 0, num_tokens), 1).result(timeout=30)
        found = client.wait_prefetch_status("peer", 10.0).result(timeout=30)
        ids = order[: found * size // block]
        if found:
            done = context.submit_retrieve("peer", key(0, 0, found * size), caches, [ids], None, size // block)
            assert done.result(timeout=30)
    client.end_session("peer").result(timeout=30)
    context.unregister().result(timeout=30)
    whole = torch.stack([cache[:, order].reshape(2, num_tokens, heads, dim) for cache in caches.values()])
    print(json.dumps({"found": found, "content": whole.view(torch.uint8).numpy().tobytes().hex()}), flush=True)


main()
