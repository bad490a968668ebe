"""Sizes and places mean what people write, and refuse what they might not mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inside import ConfigError, TierConfig, format_size, parse_place, parse_size


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        *((0, 0), (4096, 4096), ("4096", 4096), ("17B", 17), ("1KiB", 1024), ("8GiB", 8 << 30)),
        *((" 8 gib ", 8 << 30), ("1.5MiB", 3 << 19), ("200GB", 200 * 10**9), ("4TiB", 4 << 40)),
        *(("0.1KB", 100), ("0.3B", 0), ("2PiB", 2 << 50)),
    ],
)
def test_parse_size(text: int | str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


def test_percentages() -> None:
    assert parse_size("25%", total_bytes=1000) == 250
    assert parse_size("33.3%", total_bytes=1000) == 333
    assert parse_size("100%", total_bytes=(1 << 62) + 1) == (1 << 62) + 1  # exact: no float inside
    with pytest.raises(ConfigError, match="unknown total"):
        parse_size("25%")
    with pytest.raises(ConfigError, match="at most 100%"):
        parse_size("101%", total_bytes=1000)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("8G", "8GiB .* or 8GB"),
        ("8Gi", "8GiB .* or 8GB"),
        ("1.5k", "1.5KiB .* or 1.5KB"),
        ("8GiBs", "unit 'GiBs'.* unknown"),
        ("8XB", "unknown"),
        ("", "not a size"),
        ("GiB", "not a size"),
        ("-1GiB", "not a size"),
        ("1e9", "unit 'e9'|not a size"),
        ("1,5GiB", "not a size"),
        ("\u0664GiB", "not a size"),  # an Arabic digit
        ("9" * 5000, "not a size"),  # int() of it would raise its own error
        ("9999999PiB", "out of range"),
        (-1, "out of range"),
        (1 << 63, "out of range"),
        (True, "not a size"),
        (1.5, "not a size"),
        (None, "not a size"),
    ],
)
def test_bad_sizes_say_what_to_write(text: object, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        parse_size(text)  # type: ignore[arg-type]
    assert "GiB" in caught.value.remedy or "B (powers" in caught.value.remedy


@given(st.integers(0, 1 << 62))
def test_format_is_parsed_back(n_bytes: int) -> None:
    text = format_size(n_bytes)
    back = parse_size(text)
    assert abs(back - n_bytes) <= n_bytes / 200 + 1  # the parser drops fractions of a byte
    assert format_size(back) == text
    assert format_size(-n_bytes) == ("-" if n_bytes else "") + text
    assert len(text) <= 10


@given(st.integers(1, 1023), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB", "PiB"]))
def test_whole_sizes_are_exact(count: int, unit: str) -> None:
    text = f"{count}{unit}"
    assert format_size(parse_size(text)) == text


def test_no_size_is_shown_as_1024_of_a_unit() -> None:
    assert format_size((1 << 20) - 1) == "1MiB"
    assert format_size(1023) == "1023B"
    assert format_size(200 * 10**9) == "186.26GiB"
    assert format_size(1600) == "1.56KiB"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("gpu", TierConfig("gpu")),
        ("gpu:8GiB", TierConfig("gpu", "", "8GiB")),
        ("gpu:8589934592", TierConfig("gpu", "", "8589934592")),
        ("host:25%", TierConfig("host", "", "25%")),
        ("host:pool-1:8GiB", TierConfig("host", "pool-1", "8GiB")),
        ("host:Pool_2:25%", TierConfig("host", "Pool_2", "25%")),
        ("disk:/nvme/kv:200GiB", TierConfig("disk", "/nvme/kv", "200GiB")),
        ("disk:./kv", TierConfig("disk", "./kv")),
        ("disk:kv:10%", TierConfig("disk", "kv", "10%")),
        ("./kv:200GiB", TierConfig("disk", "./kv", "200GiB")),
        ("/a:b/c:d:1TB", TierConfig("disk", "/a:b/c:d", "1TB")),
        ("/runs/12:30/kv", TierConfig("disk", "/runs/12:30/kv")),
        ("/runs/12:30/", TierConfig("disk", "/runs/12:30/")),
        ("/runs/12:30:5GiB", TierConfig("disk", "/runs/12:30", "5GiB")),
        ("./with space:1GiB", TierConfig("disk", "./with space", "1GiB")),
        ("s3://bucket/kv", TierConfig("s3", "s3://bucket/kv")),
        ("s3://bucket/kv:4TiB", TierConfig("s3", "s3://bucket/kv", "4TiB")),
        ("redis://cache:6379", TierConfig("redis", "redis://cache:6379")),
        ("redis://cache:6379/0", TierConfig("redis", "redis://cache:6379/0")),
        ("redis://[::1]:6379:8GiB", TierConfig("redis", "redis://[::1]:6379", "8GiB")),
        ("S3://bucket/kv:v2", TierConfig("s3", "S3://bucket/kv:v2")),
    ],
)
def test_parse_place(text: str, place: TierConfig) -> None:
    assert parse_place(text) == place
    assert parse_place(str(place)) == place
    assert place.remote == ("://" in text)


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/users/ada")
    assert parse_place("~/kv:1GiB") == TierConfig("disk", "/users/ada/kv", "1GiB")
    assert parse_place("disk:~/kv").path == "/users/ada/kv"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        *(("", "gpu:8GiB, host:32GiB or disk:./kv"), ("gpu:", "gpu:8GiB or gpu")),
        *(("gpu:0", "Leave the place out"), ("gpu:8G", "8GiB"), ("host:lots", "8GiB")),
        *(("host:pool:", "8GiB"), ("host:pool:lots", "8GiB")),
        *(("host:pool:0", "Leave the place out"), ("host::8GiB", "host:NAME:8GiB")),
        *(("host:../etc:8GiB", "host:NAME:8GiB"), ("host:8GiB:8GiB", "host:NAME:8GiB")),
        *(("host:a:b:8GiB", "8GiB"), (f"host:{'n' * 65}:8GiB", "up to 63")),
        *(("hots:3GiB", "Did you mean host:3GiB"), ("cuda:8GiB", "Did you mean gpu:8GiB")),
        *(("ram:8GiB", "Did you mean host:8GiB"), ("kv:200GiB", "disk:kv:200GiB")),
        ("./kv:200", "./kv:200GiB for a size, or ./kv:200/ for a path"),
        *(("./kv:200G", "200GiB"), ("disk", "./kv:200GiB"), ("disk:", "./kv:200GiB")),
        *(("disk:./kv:", "./kv:200GiB"), ("disk::5GiB", "./kv:200GiB")),
        *(("disk:200GiB", "./kv:200GiB"), ("disk:./k\0v", "ordinary path")),
        *(("file:///kv", "disk:"), ("s3://", "s3://bucket/kv"), ("s3://bucket:10%", "4TiB")),
        ("s3://bucket:10G", "10GiB"),
    ],
)
def test_bad_places_say_what_to_write(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_place(text)
    assert hint in caught.value.remedy


_names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


@given(_names.filter(lambda s: s == s.strip()), st.sampled_from(["1B", "8GiB", "2.5TB", "10%"]))
def test_any_directory_survives_the_round_trip(name: str, size: str) -> None:
    place = parse_place(f"disk:/kv{name}:{size}")
    assert place == TierConfig("disk", f"/kv{name}", size)
    assert parse_place(str(place)) == place


@given(st.text(max_size=30))
def test_no_text_raises_anything_else(text: str) -> None:
    for parse in (parse_place, parse_size):
        try:
            parse(text)
        except ConfigError as error:
            assert str(error).endswith(".")


def test_place_size_bytes() -> None:
    assert TierConfig("disk", "/kv", "25%").size_bytes(400) == 100
    assert TierConfig("disk", "/kv").size_bytes(400) is None
    with pytest.raises(ConfigError):
        TierConfig("host", "", "25%").size_bytes()
