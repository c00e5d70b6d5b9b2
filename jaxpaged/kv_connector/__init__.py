"""What carries keys and values between the KV cache and anything besides the device. `base.py` is the seam.

A connector of one's own is made of these names (`jaxpaged/guides/kv_connectors.md`).
"""

from jaxpaged.kv_connector.base import (
    KVCacheLayout,
    KVConnectorBase,
    KVGroupLayout,
    KVLoad,
    KVPage,
    KVRequest,
)
from jaxpaged.kv_store.page import PageContent, PageKey
from jaxpaged.kv_store.tier import Lookup

__all__ = [
    "KVCacheLayout",
    "KVConnectorBase",
    "KVGroupLayout",
    "KVLoad",
    "KVPage",
    "KVRequest",
    "Lookup",
    "PageContent",
    "PageKey",
]
