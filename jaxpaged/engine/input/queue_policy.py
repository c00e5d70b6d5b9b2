"""A queue policy of a plugin: a function that gives every request its priority, of which the least goes first.

The scheduler orders by priority as it always does (`core/request_queue.py`), so a policy decides who is admitted, who
is preempted, and whose prompt goes first, and can break none of it.
"""

import logging
from collections.abc import Callable

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError, EngineError
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.plugins.loading import chosen, load_plugins

logger = logging.getLogger(__name__)

Policy = Callable[[EngineCoreRequest], int]
LOWEST, HIGHEST = -(2**63), 2**63 - 1


class QueuePolicy:
    """Calls a stranger's function."""

    def __init__(self, name: str, policy: Policy):
        self._name, self._policy = name, policy

    def __call__(self, request: EngineCoreRequest) -> int:
        """The priority of a complete request, whose own is that which its client gave. Raises EngineError where the
        function raises or gives no whole number: that costs this request."""
        try:
            priority = self._policy(request)
        except Exception as error:
            logger.error("the queue policy %s failed", self._name, exc_info=error)
            raise EngineError(f"the queue policy {self._name} failed on this request; see the log.") from error
        if type(priority) is not int or not LOWEST <= priority <= HIGHEST:
            raise EngineError(f"the queue policy {self._name} gave {priority!r}; it must give a whole number.")
        return priority


def queue_policy_of(config: EngineConfig) -> QueuePolicy | None:
    """What the option `queue_policy` names. Raises ConfigError where no plugin has it, or priorities do not count."""
    name = config.plugins.queue_policy
    if name is None:
        return None
    if config.scheduler.scheduling_policy != "priority":
        raise ConfigError(
            f"queue_policy is {name!r}, but the engine serves in order of arrival. Give scheduling_policy 'priority' "
            "too."
        )
    known = load_plugins(config.plugins.plugin, config.plugins.plugins).added("queue_policies")
    return QueuePolicy(name, chosen("queue_policy", name, known))
