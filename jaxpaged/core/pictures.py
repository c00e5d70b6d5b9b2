"""Which pictures a step encodes, and where the tokens of a request may end among them.

A picture is encoded in the step that first computes a token which one of its embeddings replaces, unless the encoder
cache has it (`encoder_cache.py`). A step encodes only so much, and the cache has only so many pages, so a request may
have to stop before a picture. Then it computes the text before it, and goes on in a later step. A request that stops so
for want of pages is the next to get some, however little younger ones want: else they would keep it waiting. Those that
hold pages need no others to go on, so pages become free.

With `whole_spans` no step ends within a run of tokens that embeddings replace. It ends before the run, or behind it: a
run at the first token is computed whole where a step has as many tokens, whatever share of it the request was given.

Pictures are taken for a request when the tokens of a step are divided, oldest request first. What was taken for one
that is not in the step after all is given back. This module knows neither KV blocks nor budgets of tokens.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxpaged.core.encoder_cache import EncodedPicture, EncoderCache
from jaxpaged.core.prefill import Prefill
from jaxpaged.core.request import Request
from jaxpaged.errors import RequestError
from jaxpaged.kv_cache_spec import EncoderCacheConfig
from jaxpaged.messages import EncoderInput, EngineCoreRequest, MultiModalFeature, SchedulerOutput, SchedulerStats


class Pictures:
    """Of all requests of a rank. `age` is the sort key of requests, the oldest or most important first. Not `is_cut`:
    prompts are computed whole. `stats` counts what is looked for in the cache."""

    def __init__(
        self, config: EncoderCacheConfig, stats: SchedulerStats, age: Callable[[Request], Any], *, is_cut: bool
    ):
        self.cache = EncoderCache(config)
        self._config, self._stats, self._age, self._is_cut = config, stats, age, is_cut
        self._held: dict[Request, dict[int, EncodedPicture]] = {}  # of each request, by the index of its feature
        self.longest = 0  # run that must not be cut, of all that ever came
        self._made_room = False
        self._lacking: Request | None = None  # that lacked pages in the step before
        # Of the step that is being scheduled:
        self._num_left = 0  # embeddings that it may still encode
        self._encoded: dict[EncodedPicture, MultiModalFeature] = {}
        self._taken: dict[Request, list[int]] = {}
        self._lacks_now: Request | None = None

    # ---- a step --------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step is about to be scheduled. What the steps before it were the last to read is given back."""
        self._num_left = self._config.max_step_embeds
        self._lacking, self._lacks_now = self._lacks_now, None
        for request in list(self._held):
            held = self._held[request]
            for index in [each for each in held if end_of(request.mm_features[each]) <= request.num_computed_tokens]:
                self.cache.give_back(held.pop(index))
            if not held:
                del self._held[request]

    def fit(self, divided: Sequence[tuple[Prefill, int]], budget: int) -> list[tuple[Prefill, int]]:
        """How many tokens each prefill gets, the oldest first, of those that it was given of a step's `budget`. Takes
        the pictures that they need. What one cannot use is for those behind it."""
        if not any(prefill.request.mm_features for prefill, _ in divided):
            return list(divided)
        fitted, left = [], budget
        spare = budget - sum(given for _, given in divided)
        for prefill, given in divided:
            request, num_tokens = prefill.request, max(min(prefill.most, given + spare), 0)
            if request.mm_features:
                first = request.num_tokens_with_placeholders - prefill.num_tokens
                num_tokens = self.window(request, first, num_tokens, left)
                if not self._is_cut and num_tokens < prefill.num_tokens:
                    self._put_back(request)
                    num_tokens = 0
            fitted.append((prefill, num_tokens))
            left -= num_tokens
            spare += given - num_tokens
        return fitted

    def window(self, request: Request, first: int, num_tokens: int, most: int = 0) -> int:
        """How many of its next `num_tokens` tokens, from `first` on, a request may compute in this step. Takes the
        pictures that they need. It may be more: a run at `first` that is not to be cut, if it has `most` at most."""
        if not num_tokens and not most:
            return 0
        features, end = request.mm_features, first + num_tokens
        index = bisect_right(features, first, key=end_of)
        if self._config.whole_spans:
            end = self._whole_end(features[index:], first, end, first + most)
        # A request that lacks one token decodes, and takes nothing: a picture that begins there is taken before.
        lacks_one = end == request.num_tokens_with_placeholders - 1
        for i in range(index, len(features)):
            start = first_replaced(features[i], first)
            if start >= end + lacks_one:
                break
            if not self._take(request, i):
                end = min(start, end - (start == end))
                break
        return max(end - first, 0)

    def _whole_end(self, features: Sequence[MultiModalFeature], first: int, end: int, limit: int) -> int:
        """Where a step that would end at `end` ends, so that it cuts no run: before the one there, or, if that is the
        first there is, behind it, though not behind `limit`."""
        for feature in features:
            if feature.runs[0][0] > end:
                break
            for start, length in feature.runs:
                if start > first and start < end < start + length:
                    return start
                if start <= first < start + length and end < start + length:
                    return start + length if start + length <= limit else first
        return end

    def _take(self, request: Request, index: int) -> bool:
        """Let a request hold a picture, which this step encodes if the cache lacks it. False when it cannot now."""
        held = self._held.get(request, {})
        if index in held:
            return True
        if any(each is not None and self._age(each) < self._age(request) for each in (self._lacking, self._lacks_now)):
            return False
        feature = request.mm_features[index]
        picture = self.cache.find(feature.key, feature.num_embeds)
        if picture is None:
            if feature.num_embeds > self._num_left:
                return False
            picture = self.cache.add(feature.key, feature.num_embeds)
            if picture is None:
                self._lacks_now = request
                return False
            self._num_left -= feature.num_embeds
            self._encoded[picture] = feature
        if request is self._lacking:
            self._lacking = None
        self.cache.hold(picture)
        held[index] = picture
        self._held[request] = held
        self._taken.setdefault(request, []).append(index)
        return True

    def _put_back(self, request: Request) -> None:
        """What was taken for a request in this step is given back."""
        held = self._held.get(request, {})
        for index in self._taken.pop(request, ()):
            self._give_back(held.pop(index))
        if not held:
            self._held.pop(request, None)

    def _give_back(self, picture: EncodedPicture) -> None:
        self.cache.give_back(picture)
        if not picture.num_users and picture in self._encoded:
            del self._encoded[picture]
            self._num_left += picture.num_embeds
            self.cache.forget(picture)

    def commit(self, scheduled: SchedulerOutput, requests: Sequence[Request]) -> None:
        """The step is scheduled, with these requests: say what it encodes, and where its requests find it."""
        if not self._taken:
            return
        for request in set(self._taken).difference(requests):
            self._put_back(request)
        users = {self._held[request][index]: request for request, own in self._taken.items() for index in own}
        for picture, feature in self._encoded.items():
            picture.step_id = scheduled.step_id
            scheduled.encoder_inputs.append(EncoderInput(feature, picture.page_ids, users[picture].tower_slot))
        for request, indices in self._taken.items():
            pages = [(request.request_id, index, self._held[request][index].page_ids) for index in indices]
            scheduled.encoder_pages += pages
            self._stats.mm_cache_queries += len(indices)
            self._stats.mm_cache_hits += len(indices)
        self._stats.mm_cache_hits -= len(self._encoded)
        self._encoded.clear()
        self._taken.clear()

    def make_room(
        self, running: Sequence[Request], next_waiting: Request | None, most: int, limit: int
    ) -> tuple[Sequence[Request], int]:
        """The running requests that take part in a step of at most `most` tokens, and that number, which may grow up to
        `limit`.

        They are all, unless the oldest prompt has a run that must not be cut and would not fit beside those that
        decode. Then the youngest of these pause, in every other step at most.
        """
        made_room, self._made_room = self._made_room, False
        if len(running) + self.longest <= most:
            return tuple(running), most
        prompts = [each for each in running if each.is_computing_prompt]
        decoding = [each for each in running if not each.is_computing_prompt]
        if next_waiting is not None:
            prompts.append(next_waiting)
        oldest = min(prompts, key=self._age, default=None)
        need = 0 if oldest is None else longest_run(oldest.mm_features, oldest.num_computed_tokens)
        if not need:
            return tuple(running), most
        most = min(max(most, len(decoding) + need), limit)
        num_over = len(decoding) + need - most
        if num_over <= 0 or made_room:
            return tuple(running), most
        self._made_room = True
        pausing = set(decoding[len(decoding) - num_over :])
        return tuple(each for each in running if each not in pausing), most

    # ---- requests come and go ------------------------------------------------------------------

    def check(self, message: EngineCoreRequest, max_num_batched_tokens: int) -> None:
        """Raise RequestError for pictures that could not be computed even alone."""
        name, config = message.request_id, self._config
        check_places(message)
        sizes = {feature.key: feature.num_embeds for feature in message.mm_features}
        for number, feature in enumerate(message.mm_features):
            known = self.cache.size_of(feature.key)
            size = sizes[feature.key] if known is None else known
            if feature.num_embeds != size:
                raise RequestError(
                    f"picture {number} of request {name!r} has {feature.num_embeds} embeddings, but under its key "
                    f"{feature.key.hex()[:16]}... there is one of {size}. Give them different keys.",
                    "multi_modal_data",
                )
            num_pages = self.cache.pages_for(feature.num_embeds)
            if feature.num_embeds > config.max_step_embeds or num_pages > config.num_pages:
                raise too_large(f"picture {number} of request {name!r} has {feature.num_embeds} embeddings", config)
            if config.largest is not None and not feature.is_encoded and feature.num_embeds > config.largest:
                raise RequestError(
                    f"picture {number} of request {name!r} has {feature.num_embeds} embeddings, and this engine was "
                    f"made for pictures of {config.largest} at most. Ask for a smaller one in mm_processor_kwargs, or "
                    "start the engine with mm_processor_kwargs that allow larger ones.",
                    "multi_modal_data",
                )
        longest = longest_run(message.mm_features, 0) if config.whole_spans else 0
        if longest > max_num_batched_tokens:
            raise RequestError(
                f"request {name!r} has a picture whose {longest} tokens must be computed in one step, which holds "
                f"max_num_batched_tokens = {max_num_batched_tokens}. Give a smaller picture, or raise it.",
                "multi_modal_data",
            )
        total = sum(sizes.values())
        num_pages = sum(map(self.cache.pages_for, sizes.values()))
        if not self._is_cut and (total > config.max_step_embeds or num_pages > config.num_pages):
            what = f"the pictures of request {name!r}, whose prompt is computed in one step, have {total} embeddings"
            raise too_large(what, config)
        self.longest = max(self.longest, longest)

    def are_held_by(self, request: Request) -> bool:
        """Whether a request holds embeddings."""
        return request in self._held

    def release(self, request: Request) -> None:
        """A request computes nothing any more, or begins anew."""
        self._taken.pop(request, None)
        for picture in self._held.pop(request, {}).values():
            self._give_back(picture)

    def forget(self, request: Request) -> None:
        """The computation of a request went wrong somewhere: its pictures may be to blame."""
        for feature in request.mm_features:
            picture = self.cache.find(feature.key, feature.num_embeds)
            if picture is not None:
                self.cache.forget(picture)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert that every page is accounted for, and that only `requests` hold any."""
        assert not self._encoded and not self._taken, "a step was begun, and never scheduled"
        assert set(self._held) <= set(requests)
        self.cache.check_integrity(Counter(each for held in self._held.values() for each in held.values()))


def end_of(feature: MultiModalFeature) -> int:
    """Behind the last token that an embedding replaces."""
    start, length = feature.runs[-1]
    return start + length


def first_replaced(feature: MultiModalFeature, first: int) -> int:
    """The first token from `first` on that an embedding of this picture replaces; there is one."""
    return next(max(start, first) for start, length in feature.runs if start + length > first)


def longest_run(features: Sequence[MultiModalFeature], first: int) -> int:
    """Tokens of the longest run that ends behind `first`; 0 if there is none."""
    runs = [run for feature in features[bisect_right(features, first, key=end_of) :] for run in feature.runs]
    return max((length for start, length in runs if start + length > first), default=0)


def check_places(message: EngineCoreRequest) -> None:
    """Raise RequestError for features that lie outside the prompt, or overlap, or whose numbers do not agree."""
    end = 0
    for number, feature in enumerate(message.mm_features):
        is_inside = end <= feature.offset
        end = feature.offset
        for start, length in feature.runs:
            is_inside = is_inside and start >= end and length > 0
            end = start + length
        is_inside = is_inside and end <= feature.offset + feature.length <= len(message.prompt_token_ids)
        end = feature.offset + feature.length
        num_replaced = sum(length for _, length in feature.runs)
        if not is_inside or not num_replaced or num_replaced != feature.num_embeds or len(feature.key) != 32:
            raise RequestError(
                f"picture {number} of request {message.request_id!r} does not fit its prompt of "
                f"{len(message.prompt_token_ids)} tokens: {feature.num_embeds} embeddings for the runs {feature.runs} "
                f"in {feature.length} tokens from {feature.offset} on. Let an input processor make it.",
                "multi_modal_data",
            )


def too_large(what: str, config: EncoderCacheConfig) -> RequestError:
    """What can never be encoded."""
    return RequestError(
        f"{what}, but a step encodes max_num_encoder_input_tokens = {config.max_step_embeds} at most, and the encoder "
        f"cache has {config.num_pages} pages of {config.page_size}. Give fewer or smaller pictures, or raise "
        "max_num_encoder_input_tokens and encoder_cache_size.",
        "multi_modal_data",
    )
