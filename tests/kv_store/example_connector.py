"""A connector of one's own: pages in a file of SQLite, which several engines on a machine may share.

pip install your-package                # its pyproject.toml has:
[project.entry-points."jaxpaged.kv_connectors"]
SQLite = "your_package.connector:SQLite"

jaxpaged serve --kv-transfer-config '{"kv_connector": "SQLite", "kv_role": "kv_both",
                                      "kv_connector_extra_config": {"file": "/var/kv.sqlite", "most_pages": 10000}}'
"""

import sqlite3
import threading


class SQLite:
    """At most `most_pages` pages; those that were used longest ago go."""

    def __init__(self, config, namespace):
        self.most_pages = config.get("most_pages", 10_000)
        self.lock = threading.Lock()  # jaxpaged calls from several threads
        self.database = sqlite3.connect(config["file"], check_same_thread=False, isolation_level=None)
        self.database.execute("PRAGMA journal_mode = WAL")
        self.database.execute("CREATE TABLE IF NOT EXISTS pages (name TEXT PRIMARY KEY, page BLOB, used INTEGER)")
        self.namespace = namespace

    def execute(self, statement, *values):
        with self.lock:
            return self.database.execute(statement, values).fetchall()

    def exist(self, names):
        places = ", ".join("?" * len(names))
        found = {name for (name,) in self.execute(f"SELECT name FROM pages WHERE name IN ({places})", *names)}
        return [name in found for name in names]

    def get(self, name):
        self.execute("UPDATE pages SET used = unixepoch('subsec') * 1000 WHERE name = ?", name)
        found = self.execute("SELECT page FROM pages WHERE name = ?", name)
        return found[0][0] if found else None

    def put(self, name, page):
        self.execute("INSERT OR REPLACE INTO pages VALUES (?, ?, unixepoch('subsec') * 1000)", name, page)
        newest = "SELECT name FROM pages ORDER BY used DESC LIMIT ?"
        self.execute(f"DELETE FROM pages WHERE name NOT IN ({newest})", self.most_pages)

    def delete(self, names):
        for name in names:
            self.execute("DELETE FROM pages WHERE name = ?", name)

    def close(self):
        with self.lock:
            self.database.close()
