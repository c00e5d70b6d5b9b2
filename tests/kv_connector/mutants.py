"""Deliberate mistakes in what guards an engine against a stranger's connector."""

from tests.mutants import mutants_of

_of = mutants_of(lambda module: ("tests/kv_connector/test_guarded.py",))

MUTANTS = tuple(
    _of(
        "jaxpaged/kv_connector/guarded.py",
        "",
        (
            "what a connector says of a page is believed",
            "self._load.give(key, whole, self._connector.name)",
            "self._load.give(key, whole, self._connector.name, is_checked=is_checked)",
        ),
        ("a damaged page is not discarded", "            self._pages.came_wrong(key)", "            pass"),
        (
            "a load that nobody ends goes on",
            "                load.finish()\n\n    def save_kv",
            "                pass\n\n    def save_kv",
        ),
        (
            "loads of a start that fails go on",
            "failed_to_read(error)\n            for load in loads:\n                load.finish()\n",
            "failed_to_read(error)\n",
        ),
        (
            "a connector that fails is asked on",
            "if method not in self._open or not self._breaker.allows():",
            "if method not in self._open:",
        ),
        ("hooks are called without a limit", "self._hooks.call(HOOK_SECONDS, called,", "self._hooks.call(1e6, called,"),
        ("hooks that a class has not are called", "if method not in self._open or", "if"),
        ("any result of a hook is taken", "            if not is_right(result):", "            if False:"),
        ("a request can be read at any time", "                    each.is_over = True", "                    pass"),
        ("a look-up of the wrong length is taken", "if len(states) != len(keys) or not all(", "if not all("),
        (
            "sys.exit in a connector ends a thread of ours",
            "    except BaseException as error:",
            "    except ZeroDivisionError as error:",
        ),
        ("what did not come is known to be there", "                self._learn(key, False)", "                pass"),
        (
            "a method that is missing is not told of",
            '    if missing:\n        raise ConfigError(\n            f"the kv_connector {name!r} does not',
            '    if False:\n        raise ConfigError(\n            f"the kv_connector {name!r} does not',
        ),
        ("metadata does not travel", "said = None if metadata is None else", "said = None if True else"),
    )
)
