"""`KV.trace` and timelines of a cache that really restores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowkv import KV, Step, kernels
from tests.cache.toy import check_content, geometry, keys_values, make_kv, published
from tests.inside import (
    ConfigError,
    Miss,
    RestoreEnded,
    RestoreSpan,
    StateError,
    StepPlanned,
    Timelines,
)
from tests.observe.chrome import Chrome, read_chrome

TEXT = list(range(300, 500))
LAYERS = 4


def forward(step: Step) -> int:
    """The toy model as a model: layer after layer, each of which may have to wait."""
    (seq,), (count,) = step.seqs, step.counts.tolist()
    shape, known = seq.planner.geometry, seq.tokens[: seq.length + count].tolist()
    for layer in range(LAYERS):
        k, v = keys_values(shape, layer, known, seq.length)
        kernels.append(k, v, step.pages(layer), step.batch(shape.locate(layer)[0]))
        step.appended(layer)
    return count


def stored(place: Path, **options: Any) -> KV:
    """A cache whose disk knows a prompt that its device does not."""
    with make_kv(geometry(layers=LAYERS), disk=str(place)) as kv:
        published(kv, TEXT)
        assert kv.flush()
    return make_kv(geometry(layers=LAYERS), disk=str(place), **options)


def restored(kv: KV) -> None:
    with kv.open(TEXT, wait=False) as seq:
        kv.restore([seq], forward, chunk=32)
        check_content(kv, seq, TEXT)


def read(path: Path) -> Chrome:
    return read_chrome(path.read_text())


def test_a_restore_has_tracks_and_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with stored(tmp_path / "kv") as kv, kv.trace(path) as trace, Timelines(kv.bus) as restores:
        restored(kv)
        assert trace.events and not trace.closed
    (timeline,) = restores.ended
    ended = timeline.ended
    assert ended.tokens == 192 == ended.computed_tokens + ended.loaded_tokens
    (tier,) = timeline.tiers
    spans = [span for span in timeline.spans if span.engine == tier]
    assert sum(s.tokens * s.layers for s in spans) <= ended.loaded_tokens * LAYERS
    assert ended.n_bytes == sum(span.n_bytes for span in spans) > 0
    suffix = [span for span in timeline.spans if span.engine == "suffix"]
    assert [span.layer for span in suffix] == list(range(LAYERS))
    assert {(span.token, span.tokens) for span in suffix} == {(192, 8)}
    slack_s = 1e-4
    for span in timeline.spans:
        assert span.started_s >= ended.started_s - slack_s and span.seconds >= 0
        assert span.started_s + span.seconds <= ended.started_s + ended.seconds + slack_s

    shown = read(path)
    drawn = [s for s in (*shown.on(tier), *shown.instants) if s.name.startswith("load")]
    assert len(drawn) == len(spans) and all(span.n_bytes or span.seconds for span in spans)
    assert shown.tracks("restores") == {f"restore {ended.request}"}
    assert [s.name for s in shown.on("compute")][-1] == f"suffix, layer {LAYERS - 1}"
    assert any(s.track == "steps" for s in shown.instants)


def test_nothing_is_made_for_nobody(tmp_path: Path) -> None:
    with make_kv() as kv:
        kinds = (RestoreSpan, StepPlanned)
        assert not any(map(kv.bus.wants, kinds)), "what is off costs nothing"
        with kv.trace(tmp_path / "t.json"):
            assert all(map(kv.bus.wants, kinds))
        assert not any(map(kv.bus.wants, kinds))


def test_an_exception_of_the_model_leaves_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with stored(tmp_path / "kv") as kv:
        failing = pytest.raises(RuntimeError, match="out of memory")
        with failing, kv.trace(path), kv.open(TEXT, wait=False) as seq:
            for step in kv.prefill([seq]):
                raise RuntimeError(f"out of memory in {step.seqs}")
        assert any(s.track == "steps" for s in read(path).instants)
        restored(kv)
    assert path.read_text().endswith("]\n")


def test_the_cache_ends_what_is_open(tmp_path: Path) -> None:
    kv = make_kv(disk=str(tmp_path / "kv"))
    first, second = kv.trace(tmp_path / "1.json"), kv.trace(tmp_path / "2.json")
    first.close()
    third = kv.trace(tmp_path / "3.json")
    assert kv._traces == [second, third], "what is closed is not held"
    published(kv, TEXT)
    kv.close()
    assert second.closed and third.closed
    names = {s.name for s in read(tmp_path / "2.json").instants}
    assert {"published", "miss"} <= names
    assert any(s.name == "stored" for s in read(tmp_path / "2.json").slices)
    with pytest.raises(StateError, match="closed"):
        kv.trace(tmp_path / "4.json")


def test_a_trace_before_there_is_a_model(tmp_path: Path) -> None:
    with KV() as kv, kv.trace(tmp_path / "t.json"):
        kv.bus.emit(Miss(tokens=1))
    assert len(read(tmp_path / "t.json").instants) == 1


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    with make_kv() as kv:
        with pytest.raises(ConfigError, match="cannot be written"):
            kv.trace(tmp_path)
        trace = kv.trace(tmp_path / "t.json")
        trace._file.close()
        trace._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
        with pytest.warns(UserWarning, match=r"ends here.*Check the disk"):
            trace.on_event(Miss(tokens=1))
        assert trace.closed
        kv.bus.emit(RestoreEnded(**dict.fromkeys(RestoreEnded.__struct_fields__[:8], 0)))
