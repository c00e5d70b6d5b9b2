"""Pixels on their way to a core: once each, again where the core has let go of them, and held until it has said so."""

import numpy as np

from jaxpaged.engine.pixel_sender import PixelSender, without_pixels
from jaxpaged.engine.process.wire import Wanted
from jaxpaged.messages import EngineCoreRequest, MultiModalFeature
from jaxpaged.sampling_params import SamplingParams


def request(name):
    return EngineCoreRequest(name, [1], SamplingParams(), 0.0)


def pixels(*keys, num_bytes=10):
    return {key: np.zeros(num_bytes, np.uint8) for key in keys}


def sent(sender, name):
    return [item.key for item in sender.ahead(request(name))]


def test_a_picture_crosses_once_and_again_behind_others_that_took_its_place():
    sender = PixelSender(20)
    for name, keys in (("a", b"xy"), ("b", b"yx"), ("c", b"z"), ("d", b"x"), ("e", b"y")):
        sender.hold([request(name)], pixels(*(bytes([key]) for key in keys)))
    assert sent(sender, "a") == [b"x", b"y"]
    assert sent(sender, "b") == []
    assert sent(sender, "c") == [b"z"]
    assert sent(sender, "d") == [], "it was used last but one"
    assert sent(sender, "e") == [b"y"]


def test_a_core_that_keeps_nothing_is_sent_everything():
    sender = PixelSender(0)
    sender.hold([request("a"), request("b")], pixels(b"x"))
    assert sent(sender, "a") == sent(sender, "b") == [b"x"]


def test_pixels_are_held_until_the_core_says_what_it_lacks():
    sender = PixelSender(100)
    sender.hold([request("a"), request("b")], pixels(b"x", b"y"))
    assert [(item.request_id, item.key) for item in sender.wanted(Wanted("a", [b"y", b"?"]))] == [("a", b"y")]
    assert sender.wanted(Wanted("a", [b"y"])) == [] and len(sender) == 1
    assert sender.wanted(Wanted("b", [])) == [] and len(sender) == 0


def test_nothing_is_held_of_requests_that_ended_or_of_a_core_that_is_gone():
    sender = PixelSender(100)
    sender.hold([request("a"), request("b")], pixels(b"x"))
    assert sent(sender, "a") == [b"x"]
    sender.end(["a", "unknown"])
    assert len(sender) == 1
    sender.lose_core()
    sender.hold([request("c")], pixels(b"x"))
    assert len(sender) == 1 and sent(sender, "c") == [b"x"]


def test_what_the_core_has_counts_until_its_request_ends():
    counted = []
    sender = PixelSender(100, counted.append)
    sender.hold([request("a#0"), request("a#1")], pixels(b"x", b"y"))
    sender.hold([request("b")], pixels(b"x"))
    sender.hold([request("c")], pixels(b"z"))
    assert sum(counted) == 40, "sequences of one request have them together"
    sender.wanted(Wanted("b", []))
    assert sum(counted) == 40 and sender.num_requests == 4
    sender.end(["b", "unknown", "b"])
    assert sum(counted) == 30
    sender.lose_core()
    assert sum(counted) == sender.num_requests == len(sender) == 0


def test_features_cross_without_pixels():
    feature = MultiModalFeature(b"k", "image", 0, 1, [(0, 1)], (1, 1, 1), np.zeros(3, np.uint8))
    crossing, held = without_pixels([feature, feature])
    assert [each.pixels for each in crossing] == [None, None] and feature.pixels is held[b"k"]
