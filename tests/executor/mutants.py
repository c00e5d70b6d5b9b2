"""Deliberate mistakes in groups of processes and in attention ranks, which quick tests must notice. `scripts/mutate.py`
tries them."""

from tests.mutants import mutants_of

_GROUP = (
    "tests/executor/test_group.py",
    "tests/executor/test_group_waits.py",
    "tests/engine/process/test_follower_process.py",
)
_TESTS = {
    "scheduler": ("tests/core/test_ranks.py", "tests/core/test_multi_step.py"),
    "rank": ("tests/core/test_ranks.py", "tests/core/test_multi_step.py"),
    "ray_seats": ("tests/engine/process/test_ray_seats.py",),
    "build": ("tests/engine/observability/test_kv_event_publisher.py",),
}
_of = mutants_of(lambda module: _TESTS.get(module.rpartition("/")[2].removesuffix(".py"), _GROUP))

MUTANTS = (
    # ---- who is heard
    *_of(
        "jaxpaged/executor/group.py",
        "rank or process or heard or read",
        ("ranks that there are not take part", "if hello.rank not in self.ranks:", "if False:"),
        (
            "two hosts have one rank",
            "elif before is not None and host_of(before.where) != host_of(hello.where):",
            "elif False:",
        ),
        (
            "one that starts again is taken as the one before",
            "elif before is not None and self._gathered:",
            "elif False:",
        ),
        (
            "one that starts again ends a group that nobody has joined",
            "elif before is not None and self._gathered:",
            "elif before is not None:",
        ),
        (
            "processes of a group before are heard",
            "if self._processes.get(report.rank) == process:",
            "if report.rank in self._processes:",
        ),
        (
            "strangers end an engine",
            "        if self._gathered:\n            logger",
            "        if False:\n            logger",
        ),
        ("a mistake at the start is only logged", "            self.fail(ConfigError(reason))", "            pass"),
    ),
    # ---- what is waited for
    *_of(
        "jaxpaged/executor/group.py",
        "loaded or ready or compiled or ended",
        ("one that has loaded is enough", "lambda rank: rank in self._loaded)", "lambda rank: bool(self._loaded))"),
        ("programs are not waited for", "if not self.is_ready(key)]:", "if False]:"),
        (
            "a program that one has is ready",
            "return all(key in ready for ready in self._ready.values())",
            "return any(key in ready for ready in self._ready.values())",
        ),
        ("nobody hears what ended the engine", 'Stop(reason or str(self.failure or ""))', "Stop()"),
        (
            "a collective that failed is the reason, whoever ended",
            "wait_for(lambda: self.failure is not None, MOMENT_SECONDS)",
            "wait_for(lambda: self.failure is not None, 0.0)",
        ),
    ),
    *_of(
        "jaxpaged/executor/group.py",
        "never",
        (
            "who lives and does nothing is waited for",
            "all(map(done, self.ranks)), WORK_SECONDS)",
            "all(map(done, self.ranks)), 1e9)",
        ),
        ("who waits for all goes on without them", "            self._give_up(what, done)", "            pass"),
        ("a program is waited for without end", "if time.monotonic() > deadline:", "if False:"),
        ("a thread that never ends is waited for", "self._thread.join(CLOSE_SECONDS)", "self._thread.join()"),
        ("ports are closed that a thread uses", "if self._thread.is_alive():", "if False:"),
    ),
    *_of(
        "jaxpaged/executor/group.py",
        "adapter",
        ("files of other hosts may differ", "if reply.result != info.digest:", "if False:"),
        (
            "nobody hears that the engine has ended",
            "            self._closed = True\n            self._changed.notify_all()",
            "            self._closed = True",
        ),
    ),
    *_of(
        "jaxpaged/executor/follower.py",
        "adapter",
        (
            "an adapter is read within a step",
            'args=answering, name="reader", daemon=True).start()',
            "args=answering).run()",
        ),
    ),
    *_of(
        "jaxpaged/executor/multiproc.py",
        "adapter",
        ("what one cannot read, others keep", "            self.drop_lora(request.lora_int_id)\n", ""),
    ),
    *_of(
        "jaxpaged/distributed/channel.py",
        "told or has_ended or heard",
        ("a process that has left is waited for", "raise LostError(rank) from error", "continue"),
    ),
    *_of(
        "jaxpaged/distributed/channel.py",
        "never or leave",
        ("a sign of life waits for the driver", "each.set(zmq.SNDHWM, 0)  # who", "pass  # who"),
        (
            "who has seen the driver leave waits for its own socket",
            "        self._events.close()  # `close` waits for that",
            "        pass",
        ),
        ("a socket that stays open is waited for", "thread.join(CLOSE_SECONDS)", "thread.join()"),
    ),
    *_of(
        "jaxpaged/engine/process/core_launcher.py",
        "ports",
        ("all cores listen at the ports of the first", "master_port + NUM_PORTS * number", "master_port"),
    ),
    *_of(
        "jaxpaged/engine/process/ray_seats.py",
        "cluster or leaving",
        ("each of several cores starts a cluster", "if num_cores > 1:", "if False:"),
        ("leaving Ray waits for actors", "if self._leaving.is_set():\n                    return", "pass"),
    ),
    *_of(
        "jaxpaged/engine/process/follower_process.py",
        "ends_in_peace",
        (
            "a process that was stopped stays",
            "            self._process.kill()\n\n    def _watch",
            "            pass\n\n    def _watch",
        ),
    ),
    # ---- runs of decode steps on ranks
    *_of(
        "jaxpaged/core/scheduler.py",
        "run or traffic",
        (
            "who is in the way of a run is passed over",
            "if own is None:\n                return None",
            "if own is None:\n                own = []",
        ),
        ("a run is as long as the shortest", "num_steps=max(part.num_steps", "num_steps=min(part.num_steps"),
        ("runs are never found", "if max_steps > 1 else None", "if False else None"),
    ),
    *_of(
        "jaxpaged/core/rank.py",
        "run",
        (
            "who waits is in nobody's way",
            "if self.waiting:\n            return None",
            "if False:\n            return None",
        ),
        ("a run that has no room is made", "if not found or self.kv_cache_manager.can_allocate(found) else None", ""),
    ),
    *_of(
        "jaxpaged/engine/build.py",
        "address",
        ("ranks publish at one address", "wanted.of_rank(rank)", "wanted.of_rank(first)"),
        ("addresses are not given back", "        for each in publishers:\n            each.close()", "        pass"),
    ),
)
