"""The ring: slots in opening order, closing as a message, nothing lost."""

from __future__ import annotations

import threading

from framepipe.frame import Item
from framepipe.ring import Ring, Slot


def item(i: int) -> Item:
    return Item("s", i, i, None, 0.0)


class Fence:
    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def filled(ring: Ring, i: int) -> Slot:
    slot = ring.acquire()
    assert slot is not None
    slot.items = [item(i)]
    return slot


def test_slots_come_out_in_the_order_they_were_acquired():
    ring = Ring(3)
    a, b, c = (filled(ring, i) for i in range(3))
    for slot in (c, a, b):
        ring.commit(slot)
    assert [ring.get() for _ in range(3)] == [a, b, c]


def test_an_aborted_slot_is_passed_over_and_goes_round():
    ring = Ring(2)
    a, b = filled(ring, 0), filled(ring, 1)
    ring.commit(b)
    ring.abort(a)
    assert ring.get() is b
    assert ring.acquire() is a


def test_a_released_slot_carries_its_fence():
    ring, fence = Ring(1), Fence()
    ring.commit(filled(ring, 0))
    slot = ring.get()
    ring.release(slot, fence)
    again = ring.acquire()
    assert again is slot and again.fence is fence and not fence.waited and again.items == ()


def test_drain_gives_the_runner_what_was_committed():
    ring = Ring(2)
    ring.commit(filled(ring, 0))
    ring.shutdown(drain=True)
    assert ring.get() is not None
    assert ring.get() is None and ring.get() is None


def test_shutdown_at_once_wakes_every_waiter_and_keeps_what_was_left():
    ring = Ring(1)
    ring.commit(filled(ring, 0))
    results = []
    threads = [threading.Thread(target=lambda: results.append(ring.acquire())) for _ in range(4)]
    for thread in threads:
        thread.start()
    ring.shutdown(drain=False)
    for thread in threads:
        thread.join(10)
    assert results == [None] * 4
    assert ring.get() is None
    assert [slot.items[0].index for slot in ring.leftover()] == [0]


def test_a_waiting_runner_is_woken():
    ring, results = Ring(1), []
    thread = threading.Thread(target=lambda: results.append(ring.get()))
    thread.start()
    ring.shutdown(drain=False)
    thread.join(10)
    assert results == [None]


def test_gather_waits_for_every_fence():
    ring = Ring(3)
    fences = [Fence() for _ in range(3)]
    for i in range(3):
        ring.commit(filled(ring, i))
    for fence in fences:
        ring.release(ring.get(), fence)
    mine = ring.acquire()
    others = ring.gather(mine)
    assert len(others) == 2 and [fence.waited for fence in fences] == [1, 1, 1]
    ring.scatter(others)
    assert {ring.acquire(), ring.acquire()} == set(others)


def test_many_threads_lose_nothing():
    ring, seen, order = Ring(4), [], threading.Lock()
    numbers = iter(range(400))

    def fill() -> None:
        while True:
            with order:
                number = next(numbers, None)
                if number is None:
                    return
                slot = filled(ring, number)
            ring.commit(slot)

    fillers = [threading.Thread(target=fill) for _ in range(5)]
    for thread in fillers:
        thread.start()
    for _ in range(400):
        slot = ring.get()
        seen.append(slot.items[0].index)
        ring.release(slot, None)
    for thread in fillers:
        thread.join(10)
    assert seen == list(range(400))
