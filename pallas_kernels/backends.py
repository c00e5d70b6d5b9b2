"""Choosing one of an op's backends by name, and saying why the others cannot run. Knows no op.

A backend is a module with `why_not(platform)` and `cannot_take(*operands)`: the reason, or None. Operands are
arrays or anything with their `shape` and `dtype`; what they are is the op's business.
"""

from types import ModuleType


def refusals(modules: dict[str, ModuleType], platform: str, *operands) -> dict[str, str | None]:
    """Why each backend cannot run on `platform` ("cpu", "gpu", "tpu"), or cannot take `operands` if there are any."""
    return {
        name: module.why_not(platform) or (module.cannot_take(*operands) if operands else None)
        for name, module in modules.items()
    }


def choose(op: str, modules: dict[str, ModuleType], name: str, platform: str, *operands) -> str:
    """The backend called `name`, or for "auto" the last one that can: modules are listed from general to special.

    Raises ValueError for an unknown name, and for a backend that cannot.
    """
    if name != "auto":
        module_called(op, modules, name)
    reasons = refusals(modules, platform, *operands)
    if name == "auto":
        return [known for known, reason in reasons.items() if reason is None][-1]
    if reasons[name] is not None:
        raise ValueError(f"{op} backend {name!r} cannot run on {platform!r}: {reasons[name]}. Use 'auto'.")
    return name


def module_called(op: str, modules: dict[str, ModuleType], name: str) -> ModuleType:
    """The backend called `name`. Raises ValueError with the known names."""
    if name not in modules:
        raise ValueError(f"unknown {op} backend {name!r}; known are 'auto', {', '.join(map(repr, modules))}.")
    return modules[name]


def require(op: str, modules: dict[str, ModuleType], name: str, *operands) -> ModuleType:
    """The backend called `name`, which must take `operands`. Raises ValueError otherwise."""
    module = module_called(op, modules, name)
    reason = module.cannot_take(*operands)
    if reason is not None:
        raise ValueError(f"{op} backend {name!r} cannot take these operands: {reason}. Use 'reference'.")
    return module
