"""Deliberate mistakes in pages and what travels when, which quick tests must notice. `scripts/mutate.py` tries them."""

from tests.kv_connector.mutants import MUTANTS as OF_CONNECTORS
from tests.kv_store.lmcache.mutants import MUTANTS as OF_LMCACHE
from tests.kv_store.peer_mutants import MUTANTS as OF_PEERS
from tests.mutants import mutants_of

_CORE = ("tests/engine/test_kv_chain.py", "tests/engine/test_kv_transfer.py")
_TESTS = {
    "page": ("tests/kv_store/test_page.py",),
    "prefix_file": ("tests/kv_store/test_prefix_file.py",),
    "page_folder": ("tests/kv_store/test_disk.py",),
    "direct_io": ("tests/kv_store/test_direct_io.py",),
    "remote_store": ("tests/kv_store/test_remote.py",),
    "tier_writer": ("tests/kv_store/test_tiers.py",),
    "host": ("tests/kv_store/test_host.py", "tests/kv_store/test_model.py"),
    "copies": ("tests/worker/test_kv_transfer.py",),
    "transfer": ("tests/worker/test_kv_transfer.py",),
    "pages": ("tests/worker/test_kv_transfer.py",),
    "programs": ("tests/worker/test_kv_copies.py",),
    "attention": ("tests/worker/test_kv_copies.py",),
    "kv_cache_spec": ("tests/worker/test_kv_copies.py",),
    "transfers": ("tests/core/kv_transfer/test_transfers.py", *_CORE),
    "saves": ("tests/core/kv_transfer/test_saves.py", "tests/worker/test_kv_transfer.py", *_CORE),
    "early_leases": ("tests/engine/test_early_leases.py",),
    "pieces": ("tests/core/kv_transfer/test_pieces.py",),
    "forms": ("tests/worker/test_kv_copies.py", "tests/worker/test_kv_transfer.py"),
}
_of = mutants_of(lambda module: _TESTS.get(module.rpartition("/")[2].removesuffix(".py"), _CORE))

MUTANTS = (
    *OF_PEERS,
    *OF_LMCACHE,
    *OF_CONNECTORS,
    # ---- what waits to be saved
    *_of(
        "jaxpaged/core/kv_transfer/saves.py",
        "",
        (
            "blocks are copied before they are computed",
            "before is not None and save.step_id >= before",
            "before is not None and save.step_id > before",
        ),
        ("what was overwritten is copied", "if all(block.cache_key == key for block, key in held):", "if True:"),
        ("what is overwritten next waits on", "self._urgent.append(self._waiting[key][0])", "pass"),
    ),
    *_of(
        "jaxpaged/core/kv_transfer/transfers.py",
        "",
        ("what finds no room is lost", "            self.saves.add_first(left)\n", ""),
        (
            "what is overwritten next is copied behind that",
            "            self._before_step += begun\n",
            "            self._given_up += []\n",
        ),
        (
            "pages are entered and not written",
            "            self._before_step.append(KVWrite(load.load_id, block_ids))\n",
            "            self._before_step.append(KVWrite(load.load_id, []))\n",
        ),
        (
            "an aborted prompt is lent",
            'is_computed = request.finish_reason in ("stop", "length")',
            "is_computed = True",
        ),
    ),
    *_of(
        "jaxpaged/core/kv_transfer/saves.py",
        "",
        (
            "a copy is stored when its first block is",
            "max(save.step_id for save, _ in some)",
            "min(save.step_id for save, _ in some)",
        ),
        (
            "a page that is on its way is copied again",
            "[save.piece for save in saves]), self._keys)",
            "[save.piece for save in saves]), set())",
        ),
        ("room of copies is lost", "        self.num_bytes -= num_bytes\n", ""),
    ),
    *_of(
        "jaxpaged/core/scheduler.py",
        "kv",
        (
            "what is not done yet is stored",
            "return next(iter(self._in_flight), self.ranks[0].last_step_id + 1)",
            "return self.ranks[0].last_step_id + 1",
        ),
    ),
    # ---- checksums
    *_of(
        "jaxpaged/kv_store/page.py",
        "page or bit or layers or signed or scales",
        ("layers are not checked", "if found != header.checksums[layer]:", "if found == b'':"),
        ("scales are not checked", "if found != header.scales:", "if found == b'':"),
        ("scales of a page are not looked at", "if verify and (scales :=", "if not verify and (scales :="),
        (
            "the header's digest is not looked at",
            "if not hmac.compare_digest(head[CHECK_START:CHECK_END], check_of(head, secret)):",
            "if False:",
        ),
        (
            "a header is not signed",
            "found = hmac.new(secret, covered, hashlib.sha256) if secret else hashlib.sha256(covered)",
            "found = hashlib.sha256(covered)",
        ),
        (
            "layers of a signed page have a CRC",
            'return hashlib.sha256(values).hexdigest() if secret else f"{zlib.crc32(values):08x}"',
            'return f"{zlib.crc32(values):08x}"',
        ),
        ("one page has several spellings", "if canonical != head:", "if not canonical:"),
        ("what is behind a page is not looked at", "if view.nbytes != start +", "if view.nbytes < start +"),
        ("layers begin with the scales", "offset=start + scale_bytes(header)", "offset=start"),
    ),
    *_of(
        "jaxpaged/kv_store/prefix_file.py",
        "",
        ("pages are not checked", "self._secret) != wanted:", "self._secret) == b'':"),
        ("the header is not checked", "if not hmac.compare_digest(", "if hmac.compare_digest(b'', b'x') and ("),
        ("scales have no checksum", "flat(each) for each in reversed(arrays)]), self", "flat(arrays[0])]), self"),
    ),
    *_of(
        "jaxpaged/kv_store/remote_store.py",
        "",
        (
            "what a store gives is not checked",
            "decode(page, expect_namespace=self.namespace, key=key, secret=self._secret)",
            "pass",
        ),
    ),
    *_of(
        "jaxpaged/kv_store/remote_store.py",
        "",
        ("damaged pages stay in the store", "            self.remove([key])\n", ""),
    ),
    # ---- namespaces and keys
    *_of(
        "jaxpaged/kv_store/page.py",
        "another or namespace or scales",
        ("namespaces are not compared", '"namespace": expect_namespace,', '"namespace": None,'),
        ("keys are not compared", '"key": key,', '"key": None,'),
        (
            "tokens are not compared",
            '"token_ids": None if token_ids is None else tuple(token_ids),',
            '"token_ids": None,',
        ),
        ("types are not compared", '"dtype": dtype,', '"dtype": None,'),
        ("rounded pages pass for exact ones", '"version": version,', '"version": None,'),
        ("values of facts make no other namespace", "encode_cbor(facts)", "encode_cbor(sorted(facts))"),
        ("the group is not in the header", '"group": str(header.key.group),', '"group": "0",'),
    ),
    *_of(
        "jaxpaged/kv_connector/peers.py",
        "lent or lease or consumer",
        (
            "leases are not given back at the end",
            "        self.load_finished(request)\n        self._waiting",
            "        self._waiting",
        ),
        ("a lease is given back twice", "self._sources.pop(request", "self._sources.get(request"),
        ("who waits does not say so", "                self._consumer.keep_lease(source)\n", "                pass\n"),
        (
            "a prompt is lent twice",
            "said = self._lent.pop(request.request_id, None)",
            "said = self._lent.get(request.request_id)",
        ),
    ),
    *_of(
        "jaxpaged/kv_store/direct_io.py",
        "",
        ("blocks end with what is no page", "        os.ftruncate(file, size)\n    except", "    except"),
        ("what is refused half way is written twice", "        os.lseek(file, 0, os.SEEK_SET)\n", ""),
        ("small files are waited for", "    if size < SMALLEST or not set", "    if not set"),
        ("more is read than was asked for", "return room[: min(done, size)]", "return room[:done]"),
        ("a file system that refuses is asked again", "            set_direct(file, is_direct := False)\n", ""),
        ("nothing goes around the cache", "return bool(direct)", "return False"),
    ),
    *_of(
        "jaxpaged/engine/early_leases.py",
        "",
        ("a lease ends while a grammar is checked", "call(KeepLease(lent))", "pass"),
        ("the same in an event loop", "asyncio.ensure_future(tell(True))", "asyncio.ensure_future(asyncio.sleep(0))"),
        ("a lease outlives a refusal", "        call(KeepLease(lent, is_needed=False))\n", ""),
        ("the same in an event loop of who leaves", "        await tell(False)\n", ""),
    ),
    # ---- the order of the chain
    *_of(
        "jaxpaged/core/kv_transfer/transfers.py",
        "",
        (
            "pages are loaded in part",
            "return lacking if any(idx in seen for idx in lacking) else []",
            "return [idx for idx in lacking if idx in seen]",
        ),
        ("what a failed step computed is kept", "        self.saves.discard(lost)\n", ""),
        (
            "loads for weights that were replaced are used",
            "if any(self._pieces.pages(request, *place) != pages for place, pages in zip(load.places, load.pieces)):",
            "if False:",
        ),
        ("a load is used by whoever has the name", "if self.loading.get(request.request_id) is not load:", "if False:"),
        (
            "pages that did not come are written",
            "if lost.isdisjoint(page.key for page in pages)",
            "if True",
        ),
        (
            "loads take more blocks than are free",
            "if all(n <= pool.num_free_blocks",
            "if all(n <= pool.num_free_blocks + 9",
        ),
        ("loaded blocks stay held", "                groups[g].pool.free_blocks([block])\n", "                pass\n"),
        ("nobody's patience ends", "if time.monotonic() < load.news + self.patience:", "if load.news:"),
        ("a request loads what it has", "if end <= hit.num_tokens:", "if end < 0:"),
    ),
    # ---- pages and blocks of different sizes
    *_of(
        "jaxpaged/core/kv_transfer/pieces.py",
        "",
        ("parents are the pages themselves", "hashes[idx - 1] if idx else None", "hashes[idx] if idx else None"),
        (
            "pages are named as blocks are",
            "if page_tokens != manager.hasher.block_size else None",
            "if False else None",
        ),
        (
            "pages of other weights have the same names",
            "        self._hasher.root = self._manager.hasher.root\n",
            "",
        ),
        ("half a page is saved", "return () if None in blocks else", "return () if blocks[-1] is None else"),
        (
            "windows of larger blocks are not lent",
            "MOST_PAGES * self.page_tokens, self.alignment)",
            "self.alignment)",
        ),
        (
            "beginnings end within pages",
            "math.lcm(*(piece_size.tokens for piece_size in self.piece_sizes))",
            "math.lcm(*(piece_size.block_tokens for piece_size in self.piece_sizes))",
        ),
    ),
    *_of(
        "jaxpaged/kv_store/pieces.py",
        "",
        ("sizes that do not fit are taken", "if asked > MAX_TOKENS or any(", "if asked > MAX_TOKENS or not all("),
        ("small blocks have large pages", "size == SMALLEST_JOINED or", "size < COMMON_TOKENS or"),
    ),
    *_of(
        "jaxpaged/worker/kv_transfer/transfer.py",
        "",
        (
            "what the next step computes is stored",
            "self._unconfirmed[0].save.step_id < before",
            "self._unconfirmed[0].save.step_id <= before",
        ),
        ("a revoked copy is stored later", "        self._unconfirmed.clear()\n", ""),
        (
            "room of revoked copies is lost",
            "        self._ended_saves.extend(gathered.save.save_id for gathered in self._unconfirmed)\n",
            "",
        ),
        ("room of stored copies is lost", "        self._ended_saves.append(save_id)\n", ""),
        (
            "what is discarded is stored",
            "if row[0] is not None and row[0].key not in gathered.discarded]",
            "if row[0] is not None]",
        ),
        ("consumers hear of a copy at its end", "max(SAVED_BYTES // largest, 1)", "1 << 60"),
    ),
    *_of(
        "jaxpaged/kv_connector/pages.py",
        "",
        ("pages of other tokens are loaded", "token_ids=content.token_ids,", "token_ids=None,"),
        ("pages of another form are loaded", "version=SCALED if group.has_scales else VERSION,", "version=None,"),
        ("pages of other models are loaded", "expect_namespace=self._layout.namespace,", "expect_namespace=None,"),
        (
            "pages that did not come count as come",
            'self._sources.get(page.key, "")',
            'self._sources.get(page.key, "host")',
        ),
        ("scales stay behind", "return [values] if scales is None else [values, scales]", "return [values]"),
    ),
    *_of(
        "jaxpaged/worker/kv_transfer/copies.py",
        "",
        (
            "pages that did not come are written to block 0",
            "[block_id or NOWHERE for block_id in block_ids]",
            "block_ids",
        ),
        ("what was written is forgotten", "self._device.state.kv[first : first + len(written)] = written", "pass"),
        (
            "rows of a copy's padding hold anything",
            "            array[...] = 0  # padding",
            "            array[...] = 1  # padding",
        ),
    ),
    *_of(
        "jaxpaged/worker/kv_transfer/forms.py",
        "",
        ("scales are forgotten", "values.astype(jnp.float32) * scales[..., None]", "values.astype(jnp.float32)"),
        ("rounded pages have no fact", 'return {"pages": self.name} if self.rounds else {}', "return {}"),
    ),
    *_of(
        "jaxpaged/worker/kv_transfer/programs.py",
        "",
        ("blocks are cut in another order", "jnp.moveaxis(parts, axis, 1)", "parts"),
        ("blocks are joined in another order", "jnp.moveaxis(each, 1, axis)", "each"),
    ),
    *_of(
        "jaxpaged/worker/cache/attention.py",
        "",
        (
            "copies of a head leave in place of others",
            "[..., :: spec.head_copies, :]",
            "[..., : spec.num_model_heads, :]",
        ),
        (
            "copies of a head are put behind all heads",
            "jnp.repeat(pages[0], spec.head_copies, axis=-2)",
            "jnp.concatenate([pages[0]] * spec.head_copies, axis=-2)",
        ),
    ),
    *_of(
        "jaxpaged/kv_cache_spec.py",
        "",
        ("pages tell of copies", "num_kv_heads=heads, head_copies=1", "head_copies=1"),
        ("pages tell of blocks", "return replace(whole, block_size=page_tokens)", "return whole"),
    ),
    *_of(
        "jaxpaged/kv_store/tier_writer.py",
        "",
        ("what was deleted while it was written stays", "is_unwanted = key in self._deleted", "is_unwanted = False"),
    ),
    *_of(
        "jaxpaged/kv_store/page_folder.py",
        "",
        (
            "a page appears before it is complete",
            "    unfinished = root / name.partition",
            "    unfinished = path or root / name.partition",
        ),
        ("what killed writers left stays", "os.unlink(entry.path)", "pass"),
        (
            "what others write is removed",
            "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Blocking",
            "pass  # Blocking",
        ),
    ),
)
