"""A KV connector: pages as safetensors files in a folder, which several engines may share.

jaxpaged serve --kv-transfer-config '{"kv_connector": "safetensors_folder:SafetensorsFolder", "kv_role": "kv_both",
                                      "kv_connector_extra_config": {"folder": "/tmp/kv"}}'
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxpaged.kv_connector import KVConnectorBase, Lookup


class SafetensorsFolder(KVConnectorBase):
    """`config` is the kv_connector_extra_config: `folder`, and how many `threads` read."""

    def __init__(self, config):
        self.root = Path(config["folder"])
        self.threads = ThreadPoolExecutor(config.get("threads", 4))
        self.num_read = 0

    def register_kv_caches(self, layout):
        """Engines share pages whose weights, configuration and layout are equal: whose namespace is."""
        super().register_kv_caches(layout)
        self.folder = self.root / layout.namespace[:12]
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, key):
        return self.folder / f"{key.block_hash.hex()}_g{key.group}.safetensors"

    def look_up(self, keys):
        return [Lookup.HIT if self.path(key).exists() else Lookup.MISS for key in keys]

    def start_load_kv(self, loads, metadata):
        for load in loads:
            self.threads.submit(self.load, load)

    def load(self, load):
        """`give` checks a page's digests. A page that is not given, or is wrong, is computed."""
        try:
            for page in load.missing:
                if (path := self.path(page.key)).exists():
                    self.num_read += load.give(page.key, path.read_bytes(), self.name)
        finally:
            load.finish()

    def save_kv(self, pages):
        return [self.save(page) for page in pages]

    def save(self, page):
        """A page is a safetensors file already: `kv` in it is page.values, [layers, 2, tokens, KV heads, head dim]."""
        path = self.path(page.content.key)
        unfinished = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        with open(unfinished, "wb") as file:
            file.writelines(page.buffers)
        unfinished.rename(path)
        return True

    def discard(self, keys):
        for key in keys:
            self.path(key).unlink(missing_ok=True)

    def get_kv_connector_stats(self):
        return {"pages_read": self.num_read}

    def shutdown(self):
        self.threads.shutdown(cancel_futures=True)
