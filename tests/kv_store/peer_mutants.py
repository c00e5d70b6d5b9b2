"""Deliberate mistakes in what engines that lend pages to each other say and believe, which quick tests must notice."""

from tests.mutants import mutants_of

_LEASES = ("tests/kv_store/test_handover.py", "tests/kv_store/test_handover_early.py")
_TESTS = {
    "channel": ("tests/kv_store/test_handover.py", "tests/kv_store/test_shared_memory.py"),
    "shared_memory": ("tests/kv_store/test_shared_memory.py",),
    "tls": ("tests/kv_store/test_handover_tls.py",),
}
_of = mutants_of(lambda module: _TESTS.get(module.rpartition("/")[2].removesuffix(".py"), _LEASES))

MUTANTS = (
    *_of(
        "jaxpaged/kv_store/channel.py",
        "",
        ("peers of another namespace are served", "if other.namespace != own.namespace:", "if other.namespace == '':"),
        ("peers of another version are served", "if other.version != own.version:", "if other.version == 0:"),
        ("peers without a secret are served", "if other.is_signed != own.is_signed:", "if other.is_signed is None:"),
        ("a message may be repeated", 'self._counts[direction].to_bytes(8, "big")', '(1).to_bytes(8, "big")'),
        ("a session's messages may be used in another", "self._session + self._sides", "self._sides"),
        ("signatures are not looked at", "if tag and not hmac.compare_digest(", "if tag and not len("),
        ("pages of any size are read", "if largest > self._most:", "if largest > 1 << 40:"),
        ("anything may be a message", "if magic != MAGIC or", "if"),
        ("messages of any length are read", "or num_message > MAX_MESSAGE or", "or"),
        ("a lender takes pages", "num_pages > (MAX_PAGES if self._most else 0):", "num_pages > MAX_PAGES:"),
        (
            "any number of pages is read",
            "num_pages > (MAX_PAGES if self._most else 0):",
            "not self._most and num_pages:",
        ),
        (
            "a message may be sent back to who sent it",
            "self._session + self._sides[direction] + number",
            "self._session + number",
        ),
        ("a session may be drawn by one side", "len(other.nonce) != NONCE_BYTES:", "len(other.nonce) == 99:"),
        ("who refuses is not heard", "if isinstance(other, Gone):", "if other is None:"),
        ("pages may be in memory that is none", "elif self._arena is not None:", "elif True:"),
    ),
    *_of(
        "jaxpaged/kv_store/lender.py",
        "",
        ("leases never end", "if lease.until < now]:", "if lease.until < 0]:"),
        ("leases may be renewed for ever", "min(now + self._lease_s, lease.latest)", "now + self._lease_s"),
        ("renewing does nothing", "lease.until = min(", "_ = min("),
        (
            "what was lent counts for ever",
            "self._held_bytes -= page.nbytes if page is not None else 0",
            "self._held_bytes -= 0",
        ),
        (
            "a lease that was given back goes on",
            "lease = self._leases.pop(name, None)",
            "lease = self._leases.get(name)",
        ),
        ("any page may be had under a lease", "page = lease.pages.get(key)", "page = next(iter(lease.pages.values()))"),
        ("more is lent than there is room for", "> self._capacity:", "> self._capacity << 9:"),
        ("one lease's end is that of others too", "self._wanted[key].discard(name)", "self._wanted[key].clear()"),
        (
            "pages that come later are not told of",
            "            self._changed.notify_all()\n\n    def _lacks",
            "\n    def _lacks",
        ),
        ("who waits, waits for each page anew", "and lease.waits_until is None:", "and True:"),
        ("a lease ends while its prompt is computed", "until: float = math.inf", "until: float = 0.0"),
        ("a page for which there is no room is waited for", "            del pages[key]  #", "            pass  #"),
        (
            "what has ended is lent until somebody looks",
            "        self.expire()\n        if isinstance(message, Release)",
            "        if isinstance(message, Release)",
        ),
        ("a question may be of any length", "message.keys[:MAX_PAGES]", "message.keys"),
        ("an answer may be of any length", "(room >= page.nbytes or not answer.there):", "True:"),
        ("anything may be asked", "if not isinstance(message, Get):", "if message is None:"),
        ("everybody is let in", "if self._visitors.admit(connection):", "if True:"),
        ("strangers may stay", "            self._visitors.expire()\n", ""),
        ("a prompt that is computed is waited for", "if not lease.is_open and lease.waits_until is None:", "if False:"),
        (
            "pages that are there are not kept",
            "if any(self._lacks(name, key) for name in",
            "if all(self._lacks(name, key) for name in",
        ),
        (
            "leases outlive who lends",
            "            for name in list(self._leases):\n                self._end(name)\n        for",
            "        for",
        ),
        (
            "who listens does so with no end",
            "            listener.settimeout(LISTEN_SECONDS)  #",
            "            pass  #",
        ),
    ),
    *_of(
        "jaxpaged/kv_store/borrower.py",
        "",
        ("pages are not checked", "decode(page, expect_namespace", "dict(expect_namespace"),
        ("a lease that failed is asked for again", "self._ended[lease] = None", "pass"),
        ("leases are not given back", "self._releasing.submit(self._send_release, source)", "pass"),
        ("what was given back is still expected", "                del self._sources[key]\n", "                pass\n"),
        ("leases are not renewed", "self._kept[source.lease] = source", "pass"),
        ("who hears nothing waits on", "num_silent = 0 if done else num_silent + 1", "num_silent = 0"),
        ("any answer is believed", "<= set(places):", "<= set(range(999)):"),
        ("anybody is asked for pages", "if not is_allowed(source, self._peers):  # front", "if False:  # front"),
        (
            "anybody's leases are kept",
            "            return\n        with self._lock:\n            if len(self._kept)",
            "            pass\n        with self._lock:\n            if len(self._kept)",
        ),
        ("a peer that fails is asked on and on", "if not may_ask or not breaker.allows():", "if not may_ask:"),
        (
            "keys are expected without number",
            "while len(self._sources) > MAX_KEYS:",
            "while len(self._sources) > 1 << 40:",
        ),
        ("who closes waits for answers", "                channel.hang_up()\n", "                pass\n"),
        ("pages of another secret are used", "key=keys[place], secret=self._secret)", "key=keys[place])"),
        ("pages of other blocks are used", "key=keys[place], secret", "key=None, secret"),
        (
            "a lease that is gone is renewed for ever",
            "if not isinstance(answer, Renewed) or answer.seconds <= 0:",
            "if not isinstance(answer, Renewed):",
        ),
        (
            "a connection is kept after a failure",
            "        except BaseException:\n            channel.close()\n            raise\n        finally:",
            "        except BaseException:\n            raise\n        finally:",
        ),
    ),
    *_of(
        "jaxpaged/kv_store/shared_memory.py",
        "",
        ("memory may shrink", "F_GET_SEALS) & SEALS != SEALS:", "F_GET_SEALS) < 0:"),
        ("other users get pages", "return user == os.geteuid()", "return True"),
        ("the memory itself is handed out", "        copy[:] = self._bytes", "        copy = self._bytes"),
        ("pages lie on each other", "self._end = start + size", "self._end = size"),
        ("memory of any size is mapped", "if not 0 < size <= ARENA_BYTES:", "if size < 0:"),
    ),
    *_of(
        "jaxpaged/kv_store/tls.py",
        "",
        ("who borrows needs no certificate", "context.verify_mode = ssl.CERT_REQUIRED", "pass"),
        ("any certificate will do", "ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)", "ssl._create_unverified_context()"),
    ),
    *_of(
        "jaxpaged/kv_store/handover.py",
        "",
        (
            "every port of an allowed host's name is one",
            'return source.host in names or f"{source.host}:{source.port}" in names',
            "return any(name.startswith(source.host) for name in names)",
        ),
    ),
    *_of(
        "jaxpaged/kv_store/visitors.py",
        "strang or places or hung",
        ("any number may connect", "num_others >= MAX_CONNECTIONS", "num_others >= 1 << 40"),
        ("strangers take all places", "len(self._strangers) >= MAX_STRANGERS", "False"),
        (
            "who borrows makes room for strangers",
            "next(iter(self._strangers), None) if",
            "next(iter([*self._strangers, *self._known]), None) if",
        ),
        ("strangers need not ask", "if now - since > ASK_SECONDS]", "if now - since > 1e9]"),
        ("each stranger has a line in the log", "if now < self._quiet_until:", "if now < 0:"),
        ("who borrows stays a stranger", "                self._known.add(connection)\n", "                pass\n"),
    ),
)
