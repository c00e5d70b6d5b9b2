"""An event loop whose clock jumps to the next thing to do: seconds pass at once, and exactly."""

import asyncio
import selectors


class Jumping(selectors.DefaultSelector):
    """Waits for nobody: what it would wait passes on the loop's clock."""

    loop = None

    def select(self, timeout=None):
        if timeout:
            self.loop.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is what has passed since the loop was made."""

    def __init__(self):
        self.now = 0.0
        selector = Jumping()
        selector.loop = self
        super().__init__(selector)

    def time(self):
        return self.now


def run_virtually(scenario):
    """What `scenario(clock)` returns."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario(runner.get_loop().time))
