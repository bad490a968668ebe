"""KV events: read as engines write them, recorded as traces, published by caches of FlowKV."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv import KV
from flowkv.connect.events import (
    ANSWERING_S,
    CHUNK_S,
    DEVICE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
    EventSubscription,
    Recorder,
    decode,
    encode,
)
from flowkv.sim import read_trace
from tests.cache.toy import PAGE, make_kv, published, simple
from tests.inside import ConfigError

zmq = pytest.importorskip("zmq")
hashes = st.one_of(st.binary(min_size=32, max_size=32), st.integers(0, 2**64 - 1))
events = st.one_of(
    st.builds(
        BlockStored,
        st.lists(hashes, max_size=3),
        st.none() | hashes,
        st.lists(st.integers(0, 2**31), max_size=9),
        st.integers(1, 64),
        medium=st.sampled_from([None, "GPU", "CPU"]),
        group_idx=st.none() | st.integers(0, 3),
        session_id=st.none() | st.text(max_size=3),
    ),
    st.builds(BlockRemoved, st.lists(hashes, max_size=3), st.none() | st.just("CPU")),
    st.just(AllBlocksCleared()),
)


def stored(names: str, parent: str = "", *, size: int = 16, **said: Any) -> BlockStored:
    """Blocks named by letters; their tokens are those letters."""
    ids = [ord(name) for name in names for _ in range(size)]
    above = parent.encode() or None
    return BlockStored([name.encode() for name in names], above, ids, size, **said)


# ---- the wire


@given(st.lists(events, max_size=4), st.floats(0, 4e9), st.none() | st.integers(0, 7))
def test_what_was_encoded_is_decoded(said: list[Any], ts: float, rank: int | None) -> None:
    assert decode(encode(EventBatch(ts, said, rank))) == EventBatch(ts, said, rank)


@given(st.lists(events, max_size=4))
def test_arrays_are_read_as_maps_are(said: list[Any]) -> None:
    """As earlier vLLM, SGLang and Dynamo write them: the type, then the first few fields."""
    arrays = []
    for event in said:
        values = [getattr(event, name) for name in event.__struct_fields__]
        while values and values[-1] is None:  # left out at the end
            values.pop()
        arrays.append([type(event).__name__, *values])
    assert decode(msgspec.msgpack.encode([1.5, arrays])).events == said


def test_what_a_newer_engine_adds_is_left_out() -> None:
    stranger = {"type": "BlockPraised", "block_hashes": [1]}
    wider = {"type": "BlockRemoved", "block_hashes": [2], "medium": None, "mood": "calm"}
    said = decode(msgspec.msgpack.encode([1.0, [stranger, wider], 3, "more"]))
    assert said == EventBatch(1.0, [BlockRemoved([2])], 3)


NONE = [[1.0, [[]]], [1.0, [{"type": "BlockRemoved"}]], [1.0, [5]], [1.0, [[[], 1]]], ["x", []]]


@pytest.mark.parametrize("raw", [b"", b"\x00", b"\xc1", *map(msgspec.msgpack.encode, NONE)])
def test_what_is_none_is_refused(raw: bytes) -> None:
    with pytest.raises(ConfigError, match="no KV events"):
        decode(raw)


@given(st.binary(max_size=60))
def test_noise_is_refused_or_read(raw: bytes) -> None:
    with contextlib.suppress(ConfigError):
        decode(raw)


# ---- subscribing


class Engine:
    """Sends what it is told to, numbered as it is told to, and answers for what was missed."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.out, self.asked = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.at = [
            f"tcp://127.0.0.1:{s.bind_to_random_port('tcp://127.0.0.1')}"
            for s in (self.out, self.asked)
        ]
        self.past: dict[int, bytes] = {}
        self.open = True
        self.thread = threading.Thread(target=self.answer)
        self.thread.start()

    def send(self, number: int, *said: Any, lose: bool = False) -> None:
        self.past[number] = encode(EventBatch(float(number), list(said)))
        if not lose:
            self.out.send_multipart([b"kv", number.to_bytes(8, "big"), self.past[number]])

    def answer(self) -> None:
        while self.open:
            if self.asked.poll(20):
                who, _, first = self.asked.recv_multipart()
                for number in sorted(self.past):
                    if number >= int.from_bytes(first, "big"):
                        said = [who, b"", b"kv", number.to_bytes(8, "big"), self.past[number]]
                        self.asked.send_multipart(said)
                end = (-1).to_bytes(8, "big", signed=True)
                self.asked.send_multipart([who, b"", b"", end, b""])

    def meet(self, subscription: EventSubscription) -> None:
        """Until what is sent arrives."""
        for _ in range(500):
            self.out.send_multipart([b"kv", b"not a batch"])
            if subscription._socket.poll(20):
                subscription.poll()
                return
        raise AssertionError("nobody met")

    def close(self) -> None:
        self.open = False
        self.thread.join()
        self.context.destroy(linger=0)


@pytest.fixture
def engine() -> Any:
    made = Engine()
    yield made
    made.close()


def heard(subscription: EventSubscription, count: int, within_s: float = 60.0) -> list[Any]:
    """The next events."""
    found: list[Any] = []
    end_s = time.monotonic() + within_s
    while len(found) < count and time.monotonic() < end_s:
        found += [event for batch in subscription.poll(0.1) for event in batch.events]
    return found


def test_gaps_are_asked_for(engine: Engine) -> None:
    said = [stored(name) for name in "abcdef"]
    with EventSubscription(engine.at[0], replay=engine.at[1]) as subscription:
        engine.meet(subscription)
        engine.send(0, said[0], lose=True)  # before we came
        engine.send(1, said[1])
        engine.send(2, said[2], lose=True)
        engine.send(3, said[3], lose=True)
        engine.send(4, said[4])
        assert heard(subscription, 5) == said[:5] and subscription.lost == 0


def test_what_is_lost_may_have_been_anything(engine: Engine) -> None:
    with EventSubscription(engine.at[0], replay=engine.at[1]) as subscription:
        engine.meet(subscription)
        engine.send(7, stored("a"))  # nothing of before is known any more: we begin here
        engine.send(8, stored("b"), lose=True)
        del engine.past[8]
        engine.send(9, stored("c"))
        assert heard(subscription, 4) == [
            AllBlocksCleared(), stored("a"), AllBlocksCleared(), stored("c"),
        ]  # fmt: skip
        assert subscription.lost == 1
        engine.past.clear()
        engine.send(0, stored("d"))  # it begins anew
        assert heard(subscription, 2) == [AllBlocksCleared(), stored("d")]
        assert subscription.lost == 1


def test_without_an_address_for_it_gaps_are_losses(engine: Engine) -> None:
    with EventSubscription(engine.at[0]) as subscription:
        engine.meet(subscription)
        engine.send(5, stored("a"))
        engine.send(8, stored("b"))
        assert heard(subscription, 3) == [stored("a"), AllBlocksCleared(), stored("b")]
        assert subscription.lost == 2


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match="no address"):
        EventSubscription("somewhere")


# ---- recording


def recorded(path: Path, *said: tuple[float, BlockStored | BlockRemoved]) -> Any:
    with Recorder(path / "trace") as recorder:
        recorder.feed(EventBatch(ts, [event]) for ts, event in said)
    return read_trace(path / "trace")


def requests(trace: Any) -> list[tuple[float, str, int, int]]:
    """When, which blocks (named by letters in the order of their first use), tokens in and out."""
    letters = ["".join(chr(97 + b) for b in trace.blocks[a:z]) for a, z in
               zip(trace.offsets, trace.offsets[1:], strict=False)]  # fmt: skip
    times = (trace.times_ns - trace.times_ns.min(initial=0)) / 1e9
    return list(
        zip(times.tolist(), letters, trace.input_tokens.tolist(), trace.output_tokens.tolist(),
            strict=True)
    )  # fmt: skip


def test_a_request_is_its_new_blocks_and_those_above(tmp_path: Path) -> None:
    trace = recorded(
        tmp_path, (100.0, stored("abc")), (200.0, stored("de", "b")), (300.0, stored("fg", "e"))
    )
    assert requests(trace) == [
        (0.0, "abc", 48, 0),
        (100.0, "abde", 64, 0),
        (200.0, "abdefg", 96, 0),
    ]
    assert trace.block_tokens == 16


def test_chunks_and_answers_belong_to_their_request(tmp_path: Path) -> None:
    trace = recorded(
        tmp_path,
        (0.0, stored("abcd")),
        (CHUNK_S, stored("ef", "d")),  # the next chunk
        (CHUNK_S + ANSWERING_S, stored("g", "f")),  # of the answer
        (CHUNK_S + ANSWERING_S + 1, stored("hi", "g")),  # the next turn
        (CHUNK_S + 3 * ANSWERING_S, stored("j", "i")),  # and a third one
    )
    assert requests(trace) == [
        (0.0, "abcdef" + "g", 96, 16),
        (CHUNK_S + ANSWERING_S + 1, "abcdefghi", 144, 0),
        (CHUNK_S + 3 * ANSWERING_S, "abcdefghij", 160, 0),
    ]


def test_two_that_go_on_at_one_place_are_two(tmp_path: Path) -> None:
    trace = recorded(
        tmp_path, (0.0, stored("ab")), (1.0, stored("c", "b")), (1.1, stored("d", "b"))
    )
    assert [one[1] for one in requests(trace)] == ["abc", "abd"]


def test_what_was_removed_and_comes_back_is_asked_for_again(tmp_path: Path) -> None:
    trace = recorded(
        tmp_path, (0.0, stored("ab")), (50.0, BlockRemoved([b"b", b"a"])), (100.0, stored("ab"))
    )
    assert requests(trace) == [(0.0, "ab", 32, 0), (100.0, "ab", 32, 0)]


def test_other_places_groups_and_sizes_are_not_requests(tmp_path: Path) -> None:
    trace = recorded(
        tmp_path,
        (0.0, stored("a", medium="CPU")),
        (0.0, stored("b", group_idx=1)),
        (0.0, stored("", "b")),
        (0.0, stored("xy", medium=DEVICE, group_idx=0, session_id="s")),
        (1.0, stored("z", size=8)),
        (90.0, stored("vw", session_id="s")),
    )
    assert requests(trace) == [(0.0, "ab", 32, 0), (90.0, "cd", 32, 0)]
    assert trace.sessions.tolist() == [0, 0]


def test_integers_name_blocks_as_well(tmp_path: Path) -> None:
    trace = recorded(
        tmp_path,
        (0.0, BlockStored([5, -3], None, [0] * 8, 4)),
        (60.0, BlockStored([7], 2**64 - 3, [0] * 4, 4)),
    )
    assert [one[1] for one in requests(trace)] == ["ab", "abc"]


def test_nothing_heard_is_no_trace(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace") as recorder:
        recorder.feed([EventBatch(1.0, [])])
    with pytest.raises(ConfigError):
        read_trace(tmp_path / "trace")


# ---- publishing


def test_a_cache_publishes_what_it_knows(tmp_path: Path) -> None:
    prompt = [*range(3 * PAGE + 2)]
    with make_kv(simple()) as kv:
        published(kv, prompt)
        with EventPublisher(kv, "tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*") as publisher:
            time.sleep(0.3)  # it says what is known before anybody listens
            with EventSubscription(publisher.endpoint, replay=publisher.replay) as subscription:
                end_s = time.monotonic() + 60
                found: list[Any] = []
                for number in itertools.count():  # something new each time, until it has met us
                    if found or time.monotonic() > end_s:
                        break
                    published(kv, [number, *prompt])
                    found += heard(subscription, 1, 0.2)
                first = found[0]
                assert isinstance(first, BlockStored) and first.parent_block_hash is None
                assert first.token_ids == prompt[: 3 * PAGE] and first.block_size == PAGE
                assert len(first.block_hashes) == len(set(first.block_hashes)) == 3
                kv.forget(prompt)
                removed: set[bytes] = set()
                while not removed >= set(first.block_hashes) and time.monotonic() < end_s:
                    for event in heard(subscription, 1):
                        if isinstance(event, BlockRemoved):
                            removed.update(event.block_hashes)
                assert removed >= set(first.block_hashes)


def test_tenants_are_told_apart() -> None:
    with make_kv(simple()) as kv:
        published(kv, [1] * PAGE)
        published(kv, [1] * PAGE, tenant="ours")
        with EventPublisher(kv, "tcp://127.0.0.1:*") as publisher:
            publisher.close()
            assert not kv.planner.store.index.watchers
        said = [event for _, payload in publisher._past for event in decode(payload).events]
        assert [event.token_ids for event in said] == [[1] * PAGE] * 2
        assert said[0].extra_keys is None and len(said[1].extra_keys[0][0]) == 64


def test_who_does_not_keep_up_is_told_to_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkv.connect.events.MOST_QUEUED", 4)
    monkeypatch.setattr("flowkv.connect.events._TICK_S", 1.0)  # asleep, while pages come
    with make_kv(simple()) as kv:
        with EventPublisher(kv, "tcp://127.0.0.1:*") as publisher:
            published(kv, [2] * 6 * PAGE)
        said = [event for _, payload in publisher._past for event in decode(payload).events]
    assert said[0] == AllBlocksCleared()
    assert [len(event.block_hashes) for event in said[1:]] == [2]


def test_a_cache_without_a_model_has_nothing_to_publish() -> None:
    with KV(None) as kv, pytest.raises(ConfigError, match="serves no model"):
        EventPublisher(kv, "tcp://127.0.0.1:*")


def test_an_address_in_use() -> None:
    with make_kv(simple()) as kv, EventPublisher(kv, "tcp://127.0.0.1:*") as publisher:
        with pytest.raises(ConfigError, match="cannot be published"):
            EventPublisher(kv, publisher.endpoint.replace("127.0.0.1", "*"))
        assert len(kv.planner.store.index.watchers) == 1
