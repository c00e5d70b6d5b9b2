"""The books of the encoder cache: which pages of the array on the device hold the embeddings of which picture.

A picture is known by its key. Requests hold it while they compute tokens that its embeddings replace; then it stays,
until its pages are needed for another one: of those that nobody holds, the one that was held last goes last.

Steps form a chain through the array, which each of them takes from the step before it, and in a step encoding comes
before the forward pass. So, as with KV blocks (`kv_cache/manager.py`), a page may be given out again at once: what
steps in flight still read of it, they read before it is overwritten. Two conditions remain. A picture that the step
being scheduled reads must be held, so what a request needs no more is given back before the next step, not in this one.
And what a failed step was to encode must be forgotten, so a picture knows the number of its step.

This module knows neither pixels nor how a step is made.
"""

from collections import Counter, OrderedDict

from jaxpaged.kv_cache_spec import EncoderCacheConfig


class EncodedPicture:
    """A picture with pages. `step_id`: the step that encodes it; None while that is being scheduled. `is_known` until
    its content is forgotten; who holds it then has it until he gives it back."""

    __slots__ = ("is_known", "key", "num_embeds", "num_users", "page_ids", "step_id")

    def __init__(self, key: bytes, num_embeds: int, page_ids: list[int]):
        self.key, self.num_embeds, self.page_ids = key, num_embeds, page_ids
        self.num_users = 0
        self.step_id: int | None = None
        self.is_known = True


class EncoderCache:
    """Pages, and what they hold. A picture of `num_embeds` embeddings takes whole pages."""

    def __init__(self, config: EncoderCacheConfig):
        self.num_pages, self._page_size = config.num_pages, config.page_size
        self._free = list(range(config.num_pages))[::-1]
        self._known: dict[tuple[bytes, int], EncodedPicture] = {}
        self._sizes: dict[bytes, int] = {}  # embeddings of those that are known, by key
        self._idle: OrderedDict[EncodedPicture, None] = OrderedDict()  # known, held by nobody; the oldest first
        self._num_idle_pages = 0

    @property
    def usage(self) -> float:
        """Share of the pages that requests hold, 0..1."""
        return 1 - self.num_available / self.num_pages

    @property
    def num_available(self) -> int:
        """Pages that are free, or would be if they were needed."""
        return len(self._free) + self._num_idle_pages

    @property
    def pictures(self) -> list[EncodedPicture]:
        """All that are known."""
        return list(self._known.values())

    def pages_for(self, num_embeds: int) -> int:
        return -(-num_embeds // self._page_size)

    def size_of(self, key: bytes) -> int | None:
        """How many embeddings the picture of this key has; None where it is not known."""
        return self._sizes.get(key)

    def find(self, key: bytes, num_embeds: int) -> EncodedPicture | None:
        return self._known.get((key, num_embeds))

    def add(self, key: bytes, num_embeds: int) -> EncodedPicture | None:
        """Give pages to a picture that is not known; nobody holds it yet. None, and nothing changed, when too few are
        free or idle."""
        num_pages = self.pages_for(num_embeds)
        if num_pages > self.num_available:
            return None
        while len(self._free) < num_pages:
            self.forget(next(iter(self._idle)))
        page_ids = [self._free.pop() for _ in range(num_pages)]
        picture = self._known[key, num_embeds] = EncodedPicture(key, num_embeds, page_ids)
        self._sizes[key] = num_embeds
        self._set_idle(picture)
        return picture

    def hold(self, picture: EncodedPicture) -> None:
        """One more request reads it."""
        if not picture.num_users:
            self._set_busy(picture)
        picture.num_users += 1

    def give_back(self, picture: EncodedPicture) -> None:
        """One request less reads it. Its content stays, unless it is forgotten."""
        picture.num_users -= 1
        if not picture.num_users:
            if picture.is_known:
                self._set_idle(picture)
            else:
                self._free += picture.page_ids

    def forget(self, picture: EncodedPicture) -> None:
        """Nobody finds it any more; its pages are free once nobody holds it."""
        if not picture.is_known:
            return
        picture.is_known = False
        del self._known[picture.key, picture.num_embeds]
        self._sizes.pop(picture.key, None)
        if not picture.num_users:
            self._set_busy(picture)
            self._free += picture.page_ids

    def revoke(self, step_id: int) -> None:
        """Step `step_id` and those after it have failed: forget what they were to encode."""
        for picture in self.pictures:
            if picture.step_id is None or picture.step_id >= step_id:
                self.forget(picture)

    def lose_content(self) -> None:
        """Forget all pictures."""
        for picture in self.pictures:
            self.forget(picture)

    def _set_idle(self, picture: EncodedPicture) -> None:
        self._idle[picture] = None
        self._num_idle_pages += len(picture.page_ids)

    def _set_busy(self, picture: EncodedPicture) -> None:
        del self._idle[picture]
        self._num_idle_pages -= len(picture.page_ids)

    def check_integrity(self, users: Counter[EncodedPicture]) -> None:
        """Assert that free pages, and those of pictures that are known or held by `users`, are all there are."""
        pictures = set(users).union(self._known.values())
        pages = Counter(self._free)
        for picture in pictures:
            assert picture.num_users == users[picture], f"{picture.num_users} users, not {users[picture]}"
            assert (picture in self._idle) == (picture.is_known and not picture.num_users)
            assert len(picture.page_ids) == self.pages_for(picture.num_embeds)
            pages.update(picture.page_ids)
        assert pages == Counter(range(self.num_pages)), "pages are lost, or have two owners"
        assert self._num_idle_pages == sum(len(picture.page_ids) for picture in self._idle)
        assert set(self._sizes) == {key for key, _ in self._known}
