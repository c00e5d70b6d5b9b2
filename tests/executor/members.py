"""A group of processes that only talk, all of them in this process, and how tests wait for what its threads do."""

import threading
import time

from jaxpaged.executor.follower import Post
from jaxpaged.executor.group import Group
from jaxpaged.executor.group_messages import Hello

SECRET = b"of these tests"
GIVEN = {"jax": "1", "model": "'demo'"}


class Members:
    """A group of three in this process: two of them only talk."""

    def __init__(self):
        self.ended = threading.Event()
        self.heard = []
        tell = lambda *progress: self.heard.append(progress)
        self.group = Group(3, "127.0.0.1", None, SECRET, tell, last_resort=lambda error: self.ended.set())
        self.posts = [Post(rank, self.group.addresses, SECRET) for rank in (1, 2)]

    def arrive(self, **others):
        for post in self.posts:
            post.say(Hello(post.rank, f"process {post.rank} of here", {**GIVEN, **others}))
        self.group.gather(GIVEN, 20)

    def close(self):
        self.group.close()
        for post in self.posts:
            post.close()


def hear(post):
    return post.hear(20)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


def in_thread(function, *args):
    """Call a function in a thread -> what waits for it and gives what it gave, or raises what it raised."""
    results = []

    def run():
        try:
            results.append((function(*args), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run, daemon=True)  # a mistake may make it wait for ever
    thread.start()

    def result():
        thread.join(20)
        [(value, error)] = results
        if error is not None:
            raise error
        return value

    return result
