"""Whether a module could be imported, without importing it: extras are looked for before they are asked for."""

from importlib.util import find_spec


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its package is missing; or it was put aside by a test
        return False
