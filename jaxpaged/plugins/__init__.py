"""Code of the operator's: what a plugin adds (`plugin.py`), where plugins are found and how they are loaded
(`sources.py`), what all of them add together (`loading.py`), and models that a script registers (`registered.py`).

    PLUGIN = Plugin(models=[MODEL], tool_parsers={"mine": read_calls})

A plugin is a value: loading it changes nothing but `sys.modules`. Every process that has an engine's options loads the
same ones. This package imports no jax and knows no seam's users.
"""

from jaxpaged.plugins.plugin import Plugin
from jaxpaged.plugins.registered import register_model

__all__ = ["Plugin", "register_model"]
