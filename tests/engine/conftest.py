"""Collectors of traces come with the extra `test`: in an environment without them nothing that needs them is run."""

from jaxpaged.errors import is_installed

collect_ignore = [] if is_installed("opentelemetry.sdk") else ["observability/test_tracing.py"]
