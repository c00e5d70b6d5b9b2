"""A multi-process server as LMCache's, in this process, with real shared memory. It can be told to misbehave."""

import itertools
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import msgspec
import numpy as np

from jaxpaged.kv_store.lmcache.multiprocess import lmcache_mp_pb2 as messages
from jaxpaged.kv_store.lmcache.multiprocess.pool import FOLDER, PREFIX

NUMBERS = itertools.count()
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class FakeMultiprocessServer:
    """`mangle`: method -> what becomes of its answer. `before`: method -> what is done first, such as waiting.

    `objects`: (model, workers, worker, all tokens up to the chunk's end) -> (offset, bytes); `locks` counts readers.
    """

    def __init__(self, chunk_size=16, capacity=1 << 20, serves=("Controller", "Lookup", "EngineDriven")):
        self.chunk_size, self.capacity, self.serves = chunk_size, capacity, serves
        self.calls, self.mangle, self.before, self.is_slow_to_look = Counter(), {}, {}, False
        self._lock = threading.Lock()
        self._open_memory()
        self._start(0)

    def _open_memory(self):
        self.name = f"{PREFIX}jaxpaged_{os.getpid()}_{next(NUMBERS)}"
        self.path = f"{FOLDER}/{self.name}"
        self._create()

    def _create(self):
        with open(self.path, "xb") as file:
            file.truncate(self.capacity)
        self.contexts, self.objects, self.locks = {}, {}, Counter()
        self.writes, self.reads, self.sessions, self.jobs, self.found, self.end = {}, {}, set(), {}, {}, 0

    def _start(self, port):
        self._server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        for service in messages.DESCRIPTOR.services_by_name.values():
            if service.name.removesuffix("Service") in self.serves:
                handlers = {method.name: self._handler(method) for method in service.methods}
                self._server.add_generic_rpc_handlers(
                    [grpc.method_handlers_generic_handler(service.full_name, handlers)]
                )
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def _handler(self, method):
        serve, answer = getattr(self, method.name), getattr(messages, method.output_type.name)

        def handle(request, context):
            self.calls[method.name] += 1
            self.before.get(method.name, lambda: None)()
            with self._lock:
                said = answer(**(serve(request) or {}))
            return self.mangle.get(method.name, lambda said: said)(said)

        return grpc.unary_unary_rpc_method_handler(
            handle, getattr(messages, method.input_type.name).FromString, answer.SerializeToString
        )

    @property
    def url(self):
        return f"grpc://127.0.0.1:{self.port}"

    def close(self):
        self._server.stop(None).wait()
        if os.path.lexists(self.path):
            os.unlink(self.path)

    def start_anew(self, stop=True):
        """As if the process had ended: nothing is known any more, and memory of the same name is another one."""
        if stop:
            self._server.stop(None).wait()
        os.unlink(self.path)
        self._create()
        if stop:
            self._start(self.port)

    # ---- what is in it ---------------------------------------------------------------------------------------

    def idle(self):
        """Whether nothing is locked, under way, or remembered of a request."""
        return not (+self.locks or self.writes or self.reads or self.sessions or self.jobs)

    def keep(self, model, workers, worker, tokens, content):
        """Another engine stores a chunk, the last of these tokens."""
        self.objects[model, workers, worker, tuple(tokens)] = (self.end, len(content))
        with open(self.path, "r+b") as file:
            file.seek(self.end)
            file.write(content)
        self.end += len(content)

    def content(self, model, workers, worker, tokens):
        offset, length = self.objects[model, workers, worker, tuple(tokens)]
        with open(self.path, "rb") as file:
            file.seek(offset)
            return file.read(length)

    def _names(self, key, start, end, worker=None):
        workers = range(key.world_size) if worker is None else [worker]
        return [
            (key.model_name, key.world_size, each, tuple(key.token_ids[:stop]))
            for stop in range(start + self.chunk_size, end + 1, self.chunk_size)
            for each in workers
        ]

    def _entry(self, request):
        """(context, names) of a transfer, as LMCache resolves it."""
        key = request.key
        if request.instance_id not in self.contexts:
            raise ValueError(f"non-GPU context not registered (or reaped) for instance ID {request.instance_id}")
        assert key.HasField("worker_id") and key.end <= len(key.token_ids)
        self.sessions.add(key.request_id)
        return self.contexts[request.instance_id], self._names(key, key.start, key.end, key.worker_id)

    def _slot(self, context, name):
        offset, length = self.objects.get(name) or self.writes[name]
        return {"offset": offset, "length": length, "shape": context["shape"], "dtype": context["dtype"]}

    # ---- what it is asked ------------------------------------------------------------------------------------

    def GetChunkSize(self, request):
        return {"chunk_size": self.chunk_size}

    def RegisterKvCacheEngineDrivenContext(self, request):
        shape = [2, request.num_layers, self.chunk_size, request.hidden_dim_size]
        context = {"shape": shape, "dtype": request.dtype_str, "model": (request.model_name, request.world_size)}
        self.contexts.setdefault(request.instance_id, context)
        return {"shm_name": self.name, "pool_size": self.capacity}

    def UnregisterKvCacheEngineDrivenContext(self, request):
        del self.contexts[request.instance_id]

    def Lookup(self, request):
        key, found = request.key, 0
        assert not key.HasField("worker_id") and key.num_kv_readers == 1 and request.tp_size == key.world_size
        self.sessions.add(key.request_id)
        if any(context["model"] == (key.model_name, key.world_size) for context in self.contexts.values()):
            for stop in range(self.chunk_size, key.end + 1, self.chunk_size):
                names = self._names(key, stop - self.chunk_size, stop)
                if not all(name in self.objects for name in names):
                    break
                self.locks.update(names)
                found += 1
        self.jobs[key.request_id] = found

    def QueryPrefetchStatus(self, request):
        if self.is_slow_to_look:
            return {}
        self.found[request.request_id] = self.jobs.pop(request.request_id, 0)
        return {"chunk_count": self.found[request.request_id]}

    def FreeLookupLocks(self, request):
        key = request.key
        found = self.jobs.pop(key.request_id, self.found.get(key.request_id, 0))
        self.found[key.request_id] = found
        worker = key.worker_id if key.HasField("worker_id") else None
        for name in self._names(key, key.start, min(key.end, found * self.chunk_size), worker):
            self._unlock(name)

    def _unlock(self, name):
        assert self.locks[name] > 0, "what was not locked is freed"
        self.locks[name] -= 1

    def EndSession(self, request):
        self.sessions.discard(request.request_id)
        self.found.pop(request.request_id, None)

    def PrepareStore(self, request):
        context, (name,) = self._entry(request)
        length = int(np.prod(context["shape"])) * ITEM_BYTES[context["dtype"]]
        slots = []
        if name not in self.objects and name not in self.writes and self.end + length <= self.capacity:
            self.writes[name] = (self.end, length)
            self.end += length
            slots = [self._slot(context, name)]
        said = {"slots": slots, "chunk_indices": list(range(len(slots)))}
        return {"encoded_context": msgspec.msgpack.encode(said)}

    def CommitStore(self, request):
        assert request.data == b""
        _, (name,) = self._entry(request)
        place = self.writes.pop(name, None)
        if place is not None:
            self.objects[name] = place
        return {"success": place is not None}

    def PrepareRetrieve(self, request):
        context, (name,) = self._entry(request)
        if not self.locks[name]:
            return {"success": False}
        self.reads[request.instance_id, name] = name
        return {"success": True, "encoded_context": msgspec.msgpack.encode({"slots": [self._slot(context, name)]})}

    def CommitRetrieve(self, request):
        _, (name,) = self._entry(request)
        if self.reads.pop((request.instance_id, name), None):
            self._unlock(name)
        return {"success": True}
