"""The words of a command line in the one spelling that flags have here, for those that vLLM takes too.

`--max_model_len 5` is `--max-model-len 5`, and `--help=WORD` a flag of its own. Keys of a JSON option may be given one
by one: `--kv-transfer-config.kv_role kv_both`, with a `+` at the end for one more entry of a list.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxpaged.entrypoints.cli.help_pages import WORD_FLAG
from jaxpaged.entrypoints.cli.values import json_or_text

KEY = re.compile(r"(?P<flag>--?[A-Za-z][\w-]*)\.(?P<path>[\w.-]+)(?P<more>\+?)(=(?P<value>.*))?", re.DOTALL)


def plain_words(words: Sequence[str]) -> list[str]:
    """The words with dashes in names of flags, and with one word of JSON for all keys of a flag. What follows `--` and
    what is no flag stays as it is."""
    end = words.index("--") if "--" in words else len(words)
    before, plain = list(words[:end]), list[str]()
    objects: dict[str, tuple[int, dict[str, Any]]] = {}  # of each flag that came with keys: the place of its JSON
    while before:
        word = before.pop(0)
        found = KEY.fullmatch(word)
        if found is None:
            plain.append(dashed(word))
            continue
        flag = dashed(found["flag"])
        if flag not in objects:
            objects[flag] = len(plain) + 1, {}
            plain += [flag, ""]
        value = found["value"] if found["value"] is not None else before.pop(0) if before else ""
        put(objects[flag][1], found["path"].split("."), json_or_text(value), more=bool(found["more"]))
    for place, content in objects.values():
        plain[place] = json.dumps(content)
    return [*plain, *words[end:]]


def put(content: dict[str, Any], path: Sequence[str], value: Any, more: bool) -> None:
    """Write a value where the path leads in nested objects; with `more` as one more entry of a list."""
    for key in path[:-1]:
        inner = content.get(key)
        content[key] = inner if isinstance(inner, dict) else {}
        content = content[key]
    if more:
        listed = content.get(path[-1])
        value = [*(listed if isinstance(listed, list) else []), value]
    content[path[-1]] = value


def dashed(word: str) -> str:
    """`--max_model_len=5` as `--max-model-len=5`; what is no flag stays as it is."""
    if not word.startswith("--"):
        return word
    if word.startswith("--help="):
        return WORD_FLAG + word.removeprefix("--help")
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
