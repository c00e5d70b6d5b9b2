"""Whether a module could be imported, without importing it, and how what is missing is installed: extras are looked for
before they are asked for."""

from importlib.util import find_spec


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its package is missing; or it was put aside by a test
        return False


def how_to_install(extra: str) -> str:
    """What to run for an extra. jaxpaged is installed from its source: no registry has it."""
    return f"run pip install -e '.[{extra}]' in the folder of jaxpaged's source"
