"""Binary heaps of slots that know where each slot lies, so that an entry moves in O(log n).

An entry is two words, compared one after the other; the lowest bits of the second are the slot, so
that no two are equal and the order of what leaves depends on nothing else. `place[slot]` is its
index in the heap, -1 if it is in none.
"""

from __future__ import annotations

from flowkv.policy.order.compiled import SLOT_MASK, Array, inner


@inner
def sift_up(heap: Array, place: Array, i: int) -> None:
    """Moves entry `i` towards the top until its parent is no greater."""
    key, tie = heap[i, 0], heap[i, 1]
    while i > 0:
        up = (i - 1) >> 1
        if heap[up, 0] < key or (heap[up, 0] == key and heap[up, 1] < tie):
            break
        heap[i, 0], heap[i, 1] = heap[up, 0], heap[up, 1]
        place[heap[i, 1] & SLOT_MASK] = i
        i = up
    heap[i, 0], heap[i, 1] = key, tie
    place[tie & SLOT_MASK] = i


@inner
def sift_down(heap: Array, place: Array, size: int, i: int) -> None:
    """Moves entry `i` away from the top until its children are no smaller."""
    key, tie = heap[i, 0], heap[i, 1]
    while True:
        c = 2 * i + 1
        if c >= size:
            break
        r = c + 1
        if r < size and (
            heap[r, 0] < heap[c, 0] or (heap[r, 0] == heap[c, 0] and heap[r, 1] < heap[c, 1])
        ):
            c = r
        if key < heap[c, 0] or (key == heap[c, 0] and tie < heap[c, 1]):
            break
        heap[i, 0], heap[i, 1] = heap[c, 0], heap[c, 1]
        place[heap[i, 1] & SLOT_MASK] = i
        i = c
    heap[i, 0], heap[i, 1] = key, tie
    place[tie & SLOT_MASK] = i


@inner
def put(heap: Array, place: Array, size: int, i: int, words: tuple[int, int]) -> None:
    """Entry `i` becomes these words, whatever it was."""
    heap[i, 0], heap[i, 1] = words
    sift_up(heap, place, i)
    sift_down(heap, place, size, place[words[1] & SLOT_MASK])


@inner
def take(heap: Array, place: Array, size: int, i: int) -> None:
    """Removes entry `i` of a heap of `size`; the caller counts down."""
    place[heap[i, 1] & SLOT_MASK] = -1
    last = size - 1
    if i == last:
        return
    heap[i, 0], heap[i, 1] = heap[last, 0], heap[last, 1]
    place[heap[i, 1] & SLOT_MASK] = i
    sift_down(heap, place, last, i)
    sift_up(heap, place, i)
