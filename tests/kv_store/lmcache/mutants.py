"""Deliberate mistakes in what is shared with LMCache, which quick tests must notice."""

from tests.mutants import mutants_of

_ROOM, _MULTIPROCESS = "jaxpaged/kv_store/lmcache/", "jaxpaged/kv_store/lmcache/multiprocess/"
_SETTINGS = ("tests/kv_store/lmcache/test_settings.py",)
_OF_SERVERS = (
    "tests/kv_store/lmcache/test_tier.py",
    "tests/kv_store/lmcache/test_layout.py",
    "tests/kv_store/lmcache/test_keys.py",
)
_of_server = mutants_of(lambda module: ("tests/kv_store/lmcache/test_multiprocess.py",))
_of_chunks = mutants_of(lambda module: _OF_SERVERS)
_of_settings = mutants_of(lambda module: _SETTINGS)

MUTANTS = (
    # ---- the multi-process server
    *_of_server(
        f"{_MULTIPROCESS}leases.py",
        "lease or read or locked or idle",
        (
            "what is locked may be read twice",
            "            del lease.left[chunk]\n            lease.num_readers",
            "            lease.num_readers",
        ),
        ("what is found stays locked", "or lease.until <= now or", "or"),
        ("look-ups are locked without number", "or i < too_many)", ")"),
        ("a lease ends while it is read from", "i < too_many) and not lease.num_readers", "i < too_many)"),
        ("a lease ends twice", "self._leases.pop(lease, None) if is_over else None", "pass"),
        ("what was read lies between is unlocked", "runs[-1][1] == number:", "runs[-1][1] <= number:"),
        ("the end of a lease is that of others too", "            held.remove(lease)\n", "            held.clear()\n"),
        ("what is read stays locked", "is_over = not lease.left and not lease.num_readers", "is_over = False"),
    ),
    *_of_server(
        f"{_MULTIPROCESS}pool.py",
        "places or memory or link",
        ("places behind the end are read", "if not 0 <= slot.offset <= capacity - slot.length:", "if slot.offset < 0:"),
        (
            "places before the beginning are read",
            "if not 0 <= slot.offset <= capacity",
            "if not slot.offset <= capacity",
        ),
        ("several places are one", "if more or context", "if context"),
        ("places of other chunks are read", "context.chunk_indices != (0,) or", ""),
        ("places of another form are read", "!= wanted:", "== ():"),
        ("any memory is read", "if not bare.startswith(PREFIX) or", "if"),
        ("memory in other folders is read", 'or "/" in bare or', "or"),
        ("names without end are looked for", " or len(bare.encode()) > MAX_NAME_BYTES:", ":"),
        ("links are followed", " | os.O_NOFOLLOW)", ")"),
        ("memory is as large as is said", "not 0 < capacity <= found.st_size:", "not 0 < capacity:"),
        ("memory without bytes is used", "not 0 < capacity <= found.st_size:", "not capacity <= found.st_size:"),
        (
            "other memory of the same name is the same",
            "same = (found.st_dev, found.st_ino) == self._identity and",
            "same =",
        ),
        ("memory that was cut short grows", "if os.fstat(self._file).st_size < self.capacity:", "if False:"),
        ("a server without memory is used", "if not name:", "if name is None:"),
    ),
    *_of_server(
        f"{_MULTIPROCESS}store.py",
        "",
        ("pickles are taken", "            if said.data:\n", "            if False:\n"),
        (
            "places in new memory are looked for in the old one",
            "if self._registration is not registration:",
            "if False:",
        ),
        (
            "what was copied for too long is used",
            "            check_soon(began)\n            return part\n",
            "            return part\n",
        ),
        ("places are filled too late", "        check_soon(began)\n        pool.write(", "        pool.write("),
        (
            "what was filled for too long is shown",
            "        pool.write(slot, bytes_of(part))\n        check_soon(began)\n",
            "        pool.write(slot, bytes_of(part))\n",
        ),
        ("what was not filled is shown at the end", "registration.has_doubts = True\n            raise", "raise"),
        ("what was not filled is said to be", "            self._fill(registration.pool, slot, part, began)\n", ""),
        (
            "what is not kept counts as stored",
            'if not self.calls.ask("CommitStore", **target, data=b"").success:',
            'if self.calls.ask("CommitStore", **target, data=b"") is None:',
        ),
        ("any count is believed", "if not 0 <= said.chunk_count <= chunk.number + 1:", "if False:"),
        (
            "a look-up that failed stays locked",
            "            for lease in begun:\n                lease.left.clear()\n",
            "            for lease in ():\n                lease.left.clear()\n",
        ),
        ("a look-up that took too long goes on", "if time.monotonic() + pause > deadline:", "if False:"),
        ("beginnings are looked up one by one", "if chunk not in before])", "])"),
        (
            "parts that are not read stay locked",
            "for worker in range(len(parts) + 1, self.layout.num_parts):",
            "for worker in ():",
        ),
        (
            "one who looks for a chunk unlocks it",
            "            del lease.left[chunk]\n            self._free(lease)",
            "            self._free(lease)",
        ),
        (
            "one who looks for a chunk locks those before",
            "            del lease.left[chunk]\n            self._free(lease)\n",
            "            del lease.left[chunk]\n",
        ),
        ("what was read stays locked", 'self._tidy("CommitRetrieve", **target)', "pass"),
        ("sessions stay", 'self._tidy("EndSession", request_id=lease.request_id)', "pass"),
        ("chunks of another size are used", "if size != self.layout.chunk_tokens:", "if size < 0:"),
        (
            "a server that was started anew is the same",
            "if known.pool.is_at(said.shm_name, said.pool_size):",
            "if True:",
        ),
        ("look-ups hold for ever", "self.found_for_s, self._renew_s = hold_s, renew_s", "self._renew_s = renew_s"),
        ("any chunk may be the one that is meant", "start=start * size,", "start=0,"),
        (
            "what is not found is held",
            "            else:\n                self._end(lease)\n        return [chunk in found",
            "        return [chunk in found",
        ),
        ("a server without room has kept it", "if not all(written) and self.exist([chunk]) == [False]:", "if False:"),
        ("a server that says nothing of an end is told on", "self._mute_until = time.monotonic() + MUTE_S", "pass"),
        ("a server that answers again is told of no end", "        self._mute_until = 0.0  #", "        pass  #"),
        (
            "the server is told nothing at the end",
            "if registration is not None and not registration.has_doubts:",
            "if False:",
        ),
        (
            "engines are known as of one device",
            "world_size=self.layout.num_parts,\n            block_size",
            "world_size=1,\n            block_size",
        ),
        ("chunks are taken from the end of a text", "    return chain[::-1]\n", "    return chain\n"),
        (
            "chunks are those of any model",
            "model_name=self.model,\n            world_size=self.layout.num_parts,\n            worker_id",
            "model_name='any',\n            world_size=self.layout.num_parts,\n            worker_id",
        ),
        (
            "an engine is known as of any model",
            "instance_id=instance_id,\n            model_name=self.model,",
            "instance_id=instance_id,\n            model_name='any',",
        ),
        ("an engine is known with another type", "dtype_str=self.layout.chunk_dtype.name,", "dtype_str='float64',"),
        (
            "a part of what is found is locked",
            'self.calls.ask("Lookup", key=key, tp_size=self.layout.num_parts)',
            'self.calls.ask("Lookup", key=key, tp_size=1)',
        ),
        ("what one reads alone is not being read", "            lease.num_readers = 1\n", ""),
        ("who has read is not done", "            self.leases.done(lease)\n", ""),
        (
            "what the server does not have is read",
            "            if not said.success:\n                return None\n",
            "",
        ),
        (
            "who waited for one that failed asks again",
            "            if self._failed_at > began:",
            "            if False:",
        ),
        (
            "all parts are the first",
            'target = {"key": self._key(lease, chunk.number, worker=worker),',
            'target = {"key": self._key(lease, chunk.number, worker=0),',
        ),
        ("what is said to be there later is there now", 'if said.HasField("chunk_count"):', "if True:"),
        ("the server is told as seldom as can be", "time.monotonic() - known.renewed < self._renew_s:", "True:"),
    ),
    *_of_server(
        f"{_MULTIPROCESS}calls.py",
        "hangs or otherwise or answers",
        ("answers are waited for", "timeout=self.timeout_s if timeout_s is None else timeout_s)", "timeout=30.0)"),
        ("who hangs has failed otherwise", "if error.code() is code.DEADLINE_EXCEEDED:", "if error.code() is code.OK:"),
        (
            "a connection that was closed is a mistake",
            "        except ValueError as error:",
            "        except KeyError as error:",
        ),
        ("what is said goes by a proxy", '("grpc.enable_http_proxy", 0),', '("grpc.enable_http_proxy", 1),'),
        ("who knows no method has failed", "if error.code() is code.UNIMPLEMENTED:", "if error.code() is code.OK:"),
        (
            "answers of any size are read",
            '("grpc.max_receive_message_length", MAX_ANSWER_BYTES)',
            '("grpc.max_receive_message_length", -1)',
        ),
    ),
    *_of_settings(
        f"{_MULTIPROCESS}settings.py",
        "multi_process",
        ("servers on other machines are used", "if not is_loopback(host):", "if False:"),
        ("ZeroMQ is taken for gRPC", "if address.scheme != SCHEME:", "if False:"),
        (
            "settings that mean nothing are taken",
            "if key in said and said[key] not in values:",
            "if key in said and said[key] is None:",
        ),
        (
            "keys that mean nothing are taken",
            "if not key.startswith(PREFIX) or key.removeprefix(PREFIX) not in KEYS:",
            "if not key.startswith(PREFIX):",
        ),
        ("keys of others are taken", "if not key.startswith(PREFIX) or", "if"),
        ("one of several servers is used", "or len(urls) != 1 or", "or not urls or"),
        ("a server may hang for minutes", "or not 0 < seconds <= MAX_TIMEOUT_S:", "or not 0 < seconds:"),
    ),
    # ---- its other stores
    *_of_chunks(
        f"{_ROOM}store.py",
        "answers",
        ("any description will do", "if (length, form, dtype, *extents) != wanted:", "if length < 0:"),
    ),
    *_of_chunks(
        f"{_ROOM}lm.py",
        "",
        (
            "what is said of a chunk is not looked at",
            "                check_description(said[:7], self.layout, name)\n",
            "",
        ),
        ("any code is an answer", "if answer[0] not in (FOUND, NOT_FOUND):", "if False:"),
        ("half a chunk is there", "found[i] &= self._answer", "found[i] |= self._answer"),
    ),
    *_of_chunks(
        f"{_ROOM}keys.py",
        "",
        (
            "chunks are named apart from those before",
            "item_start(0, before), item_start(4",
            "item_start(0, 0), item_start(4",
        ),
        ("names have other digits", 'digest()[:8], "big")', 'digest()[:8], "little")'),
    ),
    *_of_chunks(
        f"{_ROOM}chunks.py",
        "",
        (
            "all chunks are the first",
            "parent = self.hasher.root if chunk is None else chunk.chunk_hash",
            "parent = self.hasher.root",
        ),
        (
            "a page does not know what is before it",
            "chunk.before.hashes[-1] if chunk.before is not None else None",
            "None",
        ),
        ("a page takes itself for what is before it", "chunk.hashes[start // size - 1]", "chunk.hashes[start // size]"),
        (
            "pages have the tokens of the first one",
            "tuple(chunk.token_ids[start : start + size].tolist())",
            "tuple(chunk.token_ids[:size].tolist())",
        ),
        (
            "the oldest chunk of a page comes first",
            "return self._of_page.get(key, [])[::-1]",
            "return list(self._of_page.get(key, []))",
        ),
    ),
    *_of_chunks(
        f"{_ROOM}layout.py",
        "",
        (
            "copies of a head come in another order",
            "for part in different for _ in range(self.num_parts // len(different))",
            "for _ in range(self.num_parts // len(different)) for part in different",
        ),
        (
            "parts are joined as they come",
            "different = parts[:: len(parts) // self._num_different]",
            "different = parts[: self._num_different]",
        ),
        (
            "layers lie in the order of groups",
            "place[:, layer, ..., : self.head_dim] = numbers[i]",
            "place[:, i, ..., : self.head_dim] = numbers[i]",
        ),
        ("scales are those of another layer", "= scales[i, ..., None]", "= scales[0, ..., None]"),
        ("scales are not kept", "            if scales is not None:\n", "            if scales is None:\n"),
    ),
    *_of_chunks(
        f"{_ROOM}tier.py",
        "",
        (
            "pages of other tokens are put into a chunk",
            "expect_namespace=self.namespace,\n                key=key,\n                dtype",
            "expect_namespace=None,\n                key=None,\n                dtype",
        ),
        (
            "pages of another type are put into a chunk",
            "key=key,\n                dtype=self.layout.dtype.name,",
            "key=key,",
        ),
        (
            "pages of another shape are put into a chunk",
            "shape=self.layout.page_shape(key.group),\n",
            "\n",
        ),
        ("pages without scales are put into a chunk with", "version=self.layout.page_version,\n", "\n"),
        ("pages have another namespace", "header(chunk, key, self.namespace)", "header(chunk, key, '')"),
        (
            "what is there is collected",
            "if chunk is None or self._store.lookup([chunk]) == [Lookup.HIT]:",
            "if chunk is None:",
        ),
        ("what is known no more is collected", "            self._staging.discard(gone)\n", ""),
        ("what is known no more is looked for", "            self._store.forget(gone)\n", ""),
        (
            "a chunk goes on without a page that is another",
            "            self._staging.discard(wanting)\n            return False",
            "            return False",
        ),
        (
            "what is deleted is collected",
            "        self._staging.discard(chunks)\n        self._store.delete(chunks)",
            "        self._store.delete(chunks)",
        ),
        (
            "what is not there is read",
            "self._reader.read(chunk) if state is Lookup.HIT else None",
            "self._reader.read(chunk)",
        ),
        (
            "a chunk that is not kept is",
            "kept = (whole is None or self._store.put_array(chunk, whole)) and kept",
            "kept = whole is None or self._store.put_array(chunk, whole) or kept",
        ),
        (
            "any chunk of a page will do",
            "for state in (Lookup.HIT, Lookup.PENDING):",
            "for state in (Lookup.PENDING, Lookup.HIT):",
        ),
    ),
)
