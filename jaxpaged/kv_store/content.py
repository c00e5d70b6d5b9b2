"""What is known of a page without its bytes: its key, and what its header must say."""

from typing import NamedTuple

from jaxpaged.kv_store.page import PageKey


class PageContent(NamedTuple):
    """The keys and values of one block: of which tokens, behind which block."""

    key: PageKey
    parent: bytes | None
    token_ids: tuple[int, ...]
