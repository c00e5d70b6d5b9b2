"""What results of every kind have in common. This module knows none of them."""

from typing import Any

import msgspec


class Result(msgspec.Struct):
    """A result that callers hold in their hands: `vars(result)` gives its fields by name, as a new dict."""

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: getattr(self, name) for name in self.__struct_fields__}
