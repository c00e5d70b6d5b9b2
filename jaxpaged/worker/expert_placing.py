"""Which expert is where: even loads from uneven ones, in numpy. Knows no device and no weight.

A place is one of e that experts have on the devices, as many on each; a device has them one behind the other. Every
expert has one place at least. With more places than experts, those that most tokens go to get the others: each token
then takes one of them, so an expert's load is divided by its places.

Letters: E experts, R places that an expert can have.
"""

from typing import NamedTuple

import numpy as np

MOST_TRIES = 5
"""Numbers of copies that are tried."""
GOOD_ENOUGH = 0.97
"""Of the most loaded device's load, what all have on average: then nothing else is tried."""


class Tables(NamedTuple):
    """What routing looks up: how many places each expert has, and which; rows are filled up with the first."""

    num_places_E: np.ndarray
    place_ER: np.ndarray


def first_experts(num_experts: int, num_places: int) -> np.ndarray:
    """The expert of each place when weights are loaded: all in their order, and the first ones again."""
    return (np.arange(num_places) % num_experts).astype(np.int32)


def tables(expert_e: np.ndarray, num_experts: int) -> Tables:
    """The tables of a placement. Their shapes follow from the numbers of experts and places alone."""
    num_places_E = np.bincount(expert_e, minlength=num_experts).astype(np.int32)
    place_ER = np.zeros((num_experts, len(expert_e) - num_experts + 1), np.int32)
    for expert in range(num_experts):
        places = np.flatnonzero(expert_e == expert)
        place_ER[expert] = places[0]
        place_ER[expert, : len(places)] = places
    return Tables(num_places_E, place_ER)


def experts_of(given: Tables) -> np.ndarray:
    """The expert of each place, from the tables."""
    expert_e = np.empty(int(given.num_places_E.sum()), np.int32)
    for expert, (count, places) in enumerate(zip(*given, strict=True)):
        expert_e[places[:count]] = expert
    return expert_e


def device_loads(expert_e: np.ndarray, load_E: np.ndarray, num_devices: int) -> np.ndarray:
    """The load of each device where tokens go to experts like that."""
    num_places_E = np.bincount(expert_e, minlength=len(load_E))
    return (load_E[expert_e] / num_places_E[expert_e]).reshape(num_devices, -1).sum(axis=1)


def balanced(load_E: np.ndarray, num_places: int, num_devices: int) -> np.ndarray:
    """The expert of each place, such that devices have nearly the same load.

    Of some numbers of places to spare that go to popular experts the best is taken: all, if that is good enough. Copies
    that are more than devices can use are in the way of others.
    """
    load_E, num_spare = np.asarray(load_E, np.float64), num_places - len(load_E)
    best_e, least = np.empty(0, np.int32), np.inf
    for num_copies in np.unique(np.linspace(num_spare, 0, MOST_TRIES).astype(int))[::-1]:
        expert_e = packed(load_E, copied(load_E, num_copies, num_spare), num_devices)
        most = device_loads(expert_e, load_E, num_devices).max()
        if most < least:
            best_e, least = expert_e, most
        if least * GOOD_ENOUGH <= load_E.sum() / num_devices:
            break
    return best_e


def copied(load_E: np.ndarray, num_copies: int, num_spare: int) -> np.ndarray:
    """How many places each expert has: one, and one after the other `num_copies` more go to the expert with the largest
    load for each of its places, the rest of `num_spare` to the one with the least."""
    num_places_E = np.ones(len(load_E), np.int64)
    for _ in range(num_copies):
        num_places_E[np.argmax(load_E / num_places_E)] += 1
    num_places_E[np.argmin(load_E / num_places_E)] += num_spare - num_copies
    return num_places_E


def packed(load_E: np.ndarray, num_places_E: np.ndarray, num_devices: int) -> np.ndarray:
    """The expert of each place: each place goes to the device with the least load so far, the heaviest first. One that
    has the expert already is taken only if no other has room."""
    each_E, num_places = load_E / num_places_E, int(num_places_E.sum())
    devices: list[list[int]] = [[] for _ in range(num_devices)]
    load_of_device = np.zeros(num_devices)
    heaviest_first = np.argsort(-each_E, kind="stable")
    for expert in np.repeat(heaviest_first, num_places_E[heaviest_first]):
        with_room = [i for i in range(num_devices) if len(devices[i]) < num_places // num_devices]
        others = [i for i in with_room if expert not in devices[i]] or with_room
        best = min(others, key=lambda i: load_of_device[i])
        devices[best].append(int(expert))
        load_of_device[best] += each_E[expert]
    return np.array(devices, np.int32).reshape(-1)


def sources(before_e: np.ndarray, after_e: np.ndarray) -> np.ndarray:
    """For each place the one whose weights it gets: its own where the expert stays, and else the first that has it."""
    first_E = np.full(int(before_e.max()) + 1, len(before_e))
    np.minimum.at(first_E, before_e, np.arange(len(before_e)))
    stays_e = before_e == after_e
    return np.where(stays_e, np.arange(len(before_e)), first_E[after_e]).astype(np.int32)
