"""Configuration of a cache, from Python keywords or a TOML file, checked in one place.

Defaults: the device pool takes 25% of the device's memory (2 GiB where layers compute on the CPU),
a host tier may grow to 25% of the machine's memory (none where layers compute on the CPU: the pool
is there already), and no page is written to disk.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from flowkv.core.errors import ConfigError, FlowKVError, did_you_mean
from flowkv.core.files import MALFORMED, open_regular
from flowkv.core.geometry import CODECS

# Sizes ("8GiB", "25%") and places ("disk:/nvme/kv:200GiB"), in their written form.

_PREFIXES = ("k", "m", "g", "t", "p")
_UNITS = (
    {"": 1, "b": 1}
    | {f"{p}ib": 1024**i for i, p in enumerate(_PREFIXES, 1)}
    | {f"{p}b": 1000**i for i, p in enumerate(_PREFIXES, 1)}
)
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([A-Za-z]*|%)")
_WHOLE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:(?://)?)(.*)", re.DOTALL)
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(\S*)")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_MAX_BYTES = 2**63 - 1
_EXAMPLES = "Write a size like 8GiB, 512MiB, 200GB or 25%"

LOCAL_KINDS = ("gpu", "host", "disk")
"""Kinds of places on this machine, fastest first; every other kind is the scheme of a URI."""
_REMOTE = re.compile(
    r"(redis|rediss|valkey|valkeys|unix|mooncake|nixl|s3|gs|az|https?)(?=:/)", re.IGNORECASE
)


def parse_size(value: int | str, *, total_bytes: int | None = None) -> int:
    """Return the number of bytes that `value` denotes.

    Args:
        value: A number of bytes, or text such as "8GiB" (powers of 1024), "200GB" (powers of 1000),
            "4096" or "25%". Case does not matter; fractions of a byte are dropped.
        total_bytes: Total for a percentage.

    Raises:
        ConfigError: It is no size, is negative or above 100%, or is a percentage of an unknown
            total.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= _MAX_BYTES:
            raise ConfigError(f"size {value} is out of range", _EXAMPLES)
        return value
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        said = without_secrets(value) if isinstance(value, str) else value
        raise ConfigError(f"{said!r} is not a size", _EXAMPLES)
    number, unit = Fraction(found[1]), found[2].lower()
    if unit == "%":
        if number > 100:
            raise ConfigError(f"size {value!r} is more than 100%", "Write at most 100%")
        if total_bytes is None:
            raise ConfigError(
                f"size {value!r} is a share of an unknown total", "Write bytes, such as 8GiB"
            )
        return int(number * total_bytes / 100)
    if unit in _PREFIXES or (unit[:-1] in _PREFIXES and unit[-1] == "i"):
        letter = unit[0].upper()
        raise ConfigError(
            f"unit {found[2]!r} of size {value!r} is ambiguous",
            f"Write {found[1]}{letter}iB (powers of 1024) or {found[1]}{letter}B (powers of 1000)",
        )
    if unit not in _UNITS:
        raise ConfigError(f"unit {found[2]!r} of size {value!r} is unknown", _EXAMPLES)
    n_bytes = int(number * _UNITS[unit])
    if n_bytes > _MAX_BYTES:
        raise ConfigError(f"size {value!r} is out of range", _EXAMPLES)
    return n_bytes


def format_size(n_bytes: int) -> str:
    """Return `n_bytes` as readable text: "512B", "1.46TiB"; `parse_size` is within 0.5% of it."""
    if n_bytes < 0:
        return "-" + format_size(-n_bytes)
    if n_bytes < 1024:
        return f"{n_bytes}B"
    unit = 1024
    for prefix in _PREFIXES:
        hundredths = (200 * n_bytes + unit) // (2 * unit)
        # Decided after rounding, so that no size is ever shown as "1024KiB".
        if hundredths < 102400 or prefix == _PREFIXES[-1]:
            break
        unit *= 1024
    whole, rest = divmod(hundredths, 100)
    fraction = f".{rest:02d}".rstrip("0") if rest else ""
    return f"{whole}{fraction}{prefix.upper()}iB"


def without_secrets(text: str) -> str:
    """Return `text` without user, password and option values of any URI in it, fit to be shown.

    A text that begins like a URI is one to its end, whatever it contains; else URIs end at blanks.
    """
    text, whole = str(text), re.match(r"\s*[A-Za-z][A-Za-z0-9+.-]*:", text)
    return (_WHOLE if whole else _URI).sub(_masked, text)


def _masked(uri: re.Match[str]) -> str:
    scheme, rest = uri[1], uri[2]
    user, at, behind = rest.rpartition("@")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if scheme.rstrip(":") in LOCAL_KINDS:
        rest = f"...@{behind}" if at and ":" in user else rest
    elif at and not re.search(r"[/?#]", user):
        rest = f"...@{behind}"
    elif at and (":" in host or "@" in host):  # a password with such signs, or a path with an @
        return f"{scheme}..."
    rest, mark, options = rest.partition("?")
    shown = (f"{option.partition('=')[0]}=..." for option in options.split("&") if "=" in option)
    return scheme + rest.partition("#")[0] + (mark and mark + ("&".join(shown) or "..."))


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configured place for frames; `str(place)` parses back to it, secrets included.

    Attributes:
        kind: "gpu" (the device pool, wherever the layers compute), "host", "disk", or the scheme of
            a URI ("s3", "redis", ...).
        path: Directory of a disk, name of a host tier that processes share, or the whole URI
            without its size; "" for gpu and for a host tier of one process.
        size: Size as given ("8GiB", "25%"); "" if none was.
    """

    kind: str
    path: str = ""
    size: str = ""

    @property
    def remote(self) -> bool:
        """Return whether the place is behind a URI."""
        return self.kind not in LOCAL_KINDS

    def size_bytes(self, total_bytes: int | None = None) -> int | None:
        """Return the size of the place in bytes; None if none was given.

        Args:
            total_bytes: Memory of the device or host, or bytes of the file system, for a size that
                is a percentage.

        Raises:
            ConfigError: The size is a percentage and `total_bytes` is None.
        """
        return parse_size(self.size, total_bytes=total_bytes) if self.size else None

    def __repr__(self) -> str:
        """Return the fields as text, without the secrets of a URI."""
        path = without_secrets(self.path)
        return f"TierConfig(kind={self.kind!r}, path={path!r}, size={self.size!r})"

    def __str__(self) -> str:
        head = () if self.remote else (self.kind,)
        return ":".join((*head, *(part for part in (self.path, self.size) if part)))


def cache_home() -> Path | None:
    """Return `$XDG_CACHE_HOME/flowkv`, by default `~/.cache/flowkv`; None without a home."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(named) if named else Path.home() / ".cache") / "flowkv"
    except RuntimeError:  # neither HOME nor an entry among the users
        return None


def parse_place(text: str) -> TierConfig:
    """Parse the place that `text` denotes.

    Forms: "gpu:8GiB", "host:25%", "host:NAME:8GiB" (memory that processes share under a name),
    "disk:/nvme/kv:200GiB", "./kv:200GiB" (a path with a slash is a disk), "s3://bucket/kv". The
    size may be left out, but not behind a NAME. A path may hold colons: only the part behind the
    last one is a size, and only if it begins with a digit. In a URI a bare number is a port.

    Raises:
        ConfigError: The kind is unknown, the size is none, or a path is missing or misplaced.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(
            f"{without_secrets(text)!r} is not a place", "Write gpu:8GiB, host:32GiB or disk:./kv"
        )
    text = text.strip()
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if scheme:
        return _remote(scheme[1].lower(), text)
    kind, colon, rest = text.partition(":")
    if kind in ("gpu", "host"):
        if colon and not rest:
            raise _misplaced(text, "ends with a colon", f"Write {kind}:8GiB or {kind}")
        if kind == "host" and ":" in rest:
            return _shared(rest, text)
        if rest:
            _checked_size(rest, text)
        return TierConfig(kind, size=rest)
    if kind == "disk":
        _not_a_uri(rest, text)
        return _disk(rest, text)
    _not_a_uri(text, text)
    if "/" in text or text.startswith((".", "~")):
        return _disk(text, text)
    raise _unknown(kind, text)


def _misplaced(text: str, problem: str, remedy: str) -> ConfigError:
    gap = "" if problem.startswith(":") else " "
    return ConfigError(f"place {without_secrets(text)!r}{gap}{problem}", remedy)


def _not_a_uri(path: str, text: str) -> None:
    """Refuse a URI without its slashes, or behind a kind: a directory would bear its password.

    Raises:
        ConfigError: The text is one.
    """
    found = _REMOTE.match(path)
    if found:
        raise ConfigError(
            f"place '{text[: text.index(path)]}{found[1]}:...' is a URI in the wrong place, or"
            " lacks a slash",
            f"Write {found[1]}://..., or ./{found[1]}:... for a directory of that name",
        )


def _unknown(kind: str, text: str) -> ConfigError:
    close = difflib.get_close_matches(kind.lower(), LOCAL_KINDS, n=1)
    if kind.lower() in ("cuda", "device", "vram"):
        close = ["gpu"]
    elif kind.lower() in ("cpu", "ram", "pinned"):
        close = ["host"]
    remedy = f"For a directory write disk:{without_secrets(text)}"
    if close:
        remedy = f"Did you mean {close[0]}{without_secrets(text)[len(kind) :]}? {remedy}"
    return _misplaced(text, "is neither gpu, host, disk, a path nor a URI", remedy)


def _checked_size(size: str, text: str) -> None:
    try:
        n_bytes = parse_size(size, total_bytes=_MAX_BYTES)
    except ConfigError as error:
        raise _misplaced(text, f": {error.problem}", error.remedy) from None
    if not n_bytes:
        raise _misplaced(text, "has no room", "Leave the place out to do without it")


def _shared(rest: str, text: str) -> TierConfig:
    _not_a_uri(rest, text)
    name, _, size = rest.partition(":")
    if not _NAME.fullmatch(name):
        raise _misplaced(
            text,
            "has no name that processes could share",
            "Write host:NAME:8GiB, the name a letter and up to 63 letters, digits, - or _",
        )
    _checked_size(size, text)
    return TierConfig("host", name, size)


def _disk(rest: str, text: str) -> TierConfig:
    path, colon, size = rest.rpartition(":")
    if not colon or not size[:1].isdigit() or "/" in size:
        path, size = rest, ""
    elif size.isdigit():  # a forgotten unit is likelier than a directory of 200 bytes
        shown = without_secrets(f"disk:{path}").removeprefix("disk:")
        raise _misplaced(
            text,
            "ends with a number without a unit",
            f"Write {shown}:{size}GiB for a size, or {shown}:{size}/ for a path",
        )
    if size:
        _checked_size(size, text)
    if not path or (not size and (path.endswith(":") or _SIZE.fullmatch(path))):
        raise _misplaced(text, "names no directory", "Write disk:./kv:200GiB")
    first, _, behind = path.partition(":")
    if not size and behind and _SIZE.fullmatch(first):
        raise _misplaced(text, "has its size in front", f"Write disk:{behind}:{first}")
    if behind.startswith((".", "/", "~")) and difflib.get_close_matches(first, LOCAL_KINDS, n=1):
        problem = "names its kind twice" if first == "disk" else f"has no kind {first}"
        raise _misplaced(text, problem, f"Write disk:{behind}")
    if "\0" in path:
        raise _misplaced(text, "holds a zero byte", "Write an ordinary path")
    if os.path.isfile(path := os.path.expanduser(path)):
        raise _misplaced(text, "is a file", "Name a directory, which is made if need be")
    return TierConfig("disk", path, size)


def _remote(scheme: str, text: str) -> TierConfig:
    if scheme in (*LOCAL_KINDS, "file"):
        kind = "disk" if scheme == "file" else scheme
        raise _misplaced(text, "is written like a URI", f"Write {kind}:... without //")
    try:
        urlsplit(text)
    except ValueError:  # the text of the error may quote the password
        raise _misplaced(
            text,
            "is no URI",
            "Close brackets of an IPv6 address, and write % and two hex digits for odd signs",
        ) from None
    path, _, size = text.rpartition(":")
    # Digits alone are a port, and "//host" belongs to the scheme; both leave the URI whole.
    if size.isdigit() or not _SIZE.fullmatch(size):
        path, size = text, ""
    elif size.endswith("%"):
        raise _misplaced(text, ": a share of a remote store", "Write bytes, like 4TiB")
    else:
        _checked_size(size, text)
    if path.endswith("://"):
        raise _misplaced(text, "names no host or bucket", f"Write {scheme}://bucket/kv")
    return TierConfig(scheme, path, size)


# Choice of a place's policy and its options, and quotas of tenants in the place.

PLACE_KINDS = ("gpu", "host", "disk", "remote")
"""Kinds of places in options and quotas; "remote" is every place behind a URI."""

_PAIR = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(\S+)\s*")
_WORDS = {"true": True, "false": False}


class Selection(NamedTuple):
    """A policy by name, and the fields of its configuration."""

    name: str
    options: Mapping[str, object]


def parse_policy(text: str) -> Selection:
    """Parse a policy: "lru", or "lfu-ttl:tau_s=30,lease_s=600".

    Raises:
        ConfigError: The text is something else.
    """
    name, colon, rest = text.partition(":")
    options: dict[str, object] = {}
    for part in rest.split(",") if colon else ():
        pair = _PAIR.fullmatch(part)
        if pair is None:
            raise ConfigError(f"policy {text!r}", 'Write it like "lfu-ttl:tau_s=30,lease_s=600"')
        options[pair[1]] = _value(pair[2])
    if not name.strip():
        raise ConfigError("the name is empty", 'Use "auto" or a name of the catalogue')
    return Selection(name.strip(), options)


def _value(text: str) -> object:
    if text in _WORDS:
        return _WORDS[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def check_kinds(options: Mapping[str, object]) -> None:
    """Check that options of single places name kinds of places.

    Raises:
        ConfigError: One holds options under another name.
    """
    for kind, value in options.items():
        if isinstance(value, Mapping) and kind not in (*PLACE_KINDS, "leases"):
            raise _selection_unknown(kind)


def options_of(options: Mapping[str, object], kind: str) -> dict[str, object]:
    """Return the options of a place: those of all places, overridden by those of its kind."""
    found = {name: value for name, value in options.items() if name not in PLACE_KINDS}
    own = options.get(kind if kind in PLACE_KINDS else "remote", {})
    return found | dict(own) if isinstance(own, Mapping) else found


def parse_quota(
    quota: str | Mapping[str, str], kind: str, total_bytes: int | None
) -> tuple[int, int | None]:
    """Parse the quota of a tenant in a place.

    Args:
        quota: "2GiB:8GiB" reserves 2 GiB and allows 8 GiB at most; either side may be empty, and
            "8GiB" alone is the most. Shares ("10%:50%") are of the place. Or one such text for each
            kind of place.
        kind: Kind of the place.
        total_bytes: Capacity of the place; None if shares are only to be checked.

    Returns:
        Bytes that other tenants never take from it, and its most bytes, None for no limit.

    Raises:
        ConfigError: The text is something else, or reserves more than it allows.
    """
    if isinstance(quota, Mapping):
        for name in quota:
            if name not in PLACE_KINDS:
                raise _selection_unknown(name)
        quota = quota.get(kind if kind in PLACE_KINDS else "remote", "")
    reserve, limit = quota.split(":", 1) if ":" in quota else ("", quota)
    total = 1 << 62 if total_bytes is None else total_bytes
    kept = parse_size(reserve, total_bytes=total) if reserve.strip() else 0
    most = parse_size(limit, total_bytes=total) if limit.strip() else None
    if most is not None and kept > most:
        raise ConfigError(
            f"quota {quota!r} reserves more than it allows", 'Write "RESERVE:LIMIT", as "2GiB:8GiB"'
        )
    return kept, most


def _selection_unknown(kind: str) -> ConfigError:
    close = "gpu" if kind in ("device", "cpu", "cuda") else ""
    hint = f"Did you mean {close!r}? " if close else did_you_mean(kind, PLACE_KINDS)
    return ConfigError(
        f"{kind!r} is no kind of place", f"{hint}Use one of {', '.join(PLACE_KINDS)}"
    )


ENVIRONMENT = "FLOWKV_CONFIG"
COLD_DIVERGENCE = 0.005
DEFAULT_GPU_SIZE = "25%"
DEFAULT_CPU_POOL_SIZE = "2GiB"
DEFAULT_HOST_SIZE = "25%"
DEFAULT_DISK_SIZE = "10%"
AUTO = "auto"
LEAST_SECRET_BYTES = 16
_STACK_FIELDS = ("gpu", "host", "disk")
# tokens of a page, and of the raw end of a sequence: for codecs, and for "auto"
_TOKENS, _AUTO_TOKENS = 64, 128
_EITHER: dict[str, tuple[str, ...]] = {
    "non_finite": ("raw", "error"),
    "durability": ("none", "sync"),
    "integrity": ("xxh3", "aead"),
    "lossless": ("auto", "on", "off"),
    "prefetch": ("auto", "markov", "off"),
    "admit": ("all", "second-touch", "auto"),
}


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Configuration of a cache. `load_config` also checks types; constructing checks values only.

    Attributes:
        gpu: Size of the device pool; default 25% of the device's memory, 2 GiB on the CPU.
        host: Most memory of the host tier; default 25% of the machine's memory, grown as needed,
            and no host tier where the layers compute on the CPU. 0 for none.
        disk: Directory of the disk tier, with its size ("./kv:200GiB"; default 10% of the file
            system); default no disk tier.
        tiers: The whole stack, fastest first, instead of `gpu`, `host` and `disk`: also
            "host:NAME:8GiB", memory that processes share, and URIs of remote stores. A device pool
            is always there, listed or not; other places only if listed.
        codec: Encoding of full pages: "raw" (exact), "kv8", "k8v4", "kv4c" or "kv4h", or "auto":
            "kv8", and "kv4c" further back.
        cold: "kvt" stores raw pages on tiers below memory at one to two bits a value, once
            `KV.calibrate` has learned how; "kvt:kl=0.01" names the divergence that this may cost
            (default 0.005), and "kvt:auto" calibrates a model once, before a prompt, from the first
            16,000 tokens of others. Caches without it do not read such pages.
        recent_tokens: Tokens at the end of each open sequence that stay in raw pages, besides the
            page that is being filled; default 128 for "auto", 64 for other codecs.
        warm_tokens: Tokens before these that "auto" leaves in pages of 8 bits.
        non_finite: Treatment of a full page that no codec can hold, as it has NaN, infinity or
            numbers beyond float16's scales: it stays "raw", with a warning, or raises an "error".
        policy: Name of the eviction policy of each place, with options if need be: "auto", "lru",
            "lfu-ttl:tau_s=30".
        policy_options: Fields of its configuration. Under "gpu", "host", "disk" and "remote": those
            of these places only, as in `{"gpu": {"lease_s": 600}, "host": {"lease_s": 1800}}`.
        quotas: Bytes of each place for tenants, by tenant name: "2GiB:8GiB" keeps 2 GiB from being
            taken by others and allows 8 GiB at most; "8GiB" is a limit alone, "10%:50%" are shares
            of each place, and `{"gpu": "1GiB:", "disk": ":50%"}` tells places apart.
        prefetch: "auto" brings pages onto their device before they are asked for: for requests that
            wait, hints, and chains that the policy expects again, as long as these guesses are
            right. "markov" learns the order in which documents and templates recur instead. Fields
            of `flowkv.policy.prefetch.PrefetchConfig` set other values; "off" brings only pages
            that `KV.prefetch` and `KV.enqueue` ask for.
        learned: Keep what policies learned in a disk tier's directory, so that the next process
            starts with it. It names no prompt and no tenant.
        record: File to which requests are written as a trace, with salted ids only; "" for none.
        page_size: Tokens per page, a multiple of 8 between 8 and 256; default 64, 128 for "auto".
        tenant: Tenant of requests that name none. Tenants never share pages.
        namespace: Replaces the model's own identity; two caches with equal namespaces share pages.
        secret: Up to 64 bytes as hex that go into every key, so that keys cannot be guessed from
            known text, and into those of `integrity="aead"`; "" for none.
        integrity: Check of frames on lasting tiers: "xxh3" finds every accident; "aead" encrypts
            them for each tenant (AES-256-GCM), so that none is read, made or changed without the
            secret. Needs a `secret` of at least 16 bytes and `flowkv[aead]`.
        lossless: "auto" compresses frames of 16-bit pages on lasting tiers, without loss, where
            that was measured to be faster; "on" wherever they shrink; "off" never does.
        exclusive: Refuse a store directory that another process writes, instead of reading it only.
        durability: "sync" flushes every written page to the medium; "none" leaves that to the
            operating system, and a power cut loses the latest pages.
        write_back: Write filled pages down the tiers in the background, before they are evicted.
        admit: Pages to write to disks and remote stores. "all" writes each as soon as it is full.
            The others write pages when they leave memory, and at `flush` and `close`, to spare the
            medium: "second-touch" once two requests have used a page, "auto" unless pages of its
            turn hardly ever return (`flowkv.policy.admission`). Pinned pages, and those with a
            lease or `Retain` that does not shorten their stay, are always written at once.
        defragment_bytes: Most bytes moved within the device pool at the end of a step, where free
            memory is scattered between pages of several sizes; 0 for never.
        overflow: Sequences may be longer than the device pool: pages that do not fit stay in host
            memory or on disk, and are attended from there.
        graphs: "auto" captures decode steps and short prompts on GPUs as CUDA graphs and replays
            them; a size bounds the memory that graphs hold (default: a sixteenth of the device);
            "off" captures none.
        max_rows: Most sequences in one step.
        load_deadline_s: Longest wait for a page before it is computed instead.
        exit_s: Longest time at the end of the process for queued writes of a cache that was not
            closed; 0 drops them.
        audit: Share of restored pages, 0 to 1, that are recomputed and compared; wrong ones are
            forgotten everywhere, and reported. 0.01 costs about as much as recomputing a hundredth
            of the restored pages.
    """

    gpu: int | str | None = None
    host: int | str | None = None
    disk: str | None = None
    tiers: tuple[str, ...] | None = None
    codec: str = "raw"
    cold: str = ""
    recent_tokens: int | None = None
    warm_tokens: int = 256
    non_finite: Literal["raw", "error"] = "raw"
    policy: str = "auto"
    policy_options: dict[str, Any] = {}
    quotas: dict[str, str | dict[str, str]] = {}
    prefetch: Literal["auto", "markov", "off"] | dict[str, Any] = "auto"
    learned: bool = True
    record: str = ""
    page_size: int | None = None
    tenant: str = ""
    namespace: str = ""
    secret: str = ""
    integrity: Literal["xxh3", "aead"] = "xxh3"
    lossless: Literal["auto", "on", "off"] = "auto"
    exclusive: bool = False
    durability: Literal["none", "sync"] = "none"
    write_back: bool = True
    admit: Literal["all", "second-touch", "auto"] = "all"
    defragment_bytes: int = 16 << 20
    overflow: bool = False
    graphs: int | str = "auto"
    max_rows: int = 256
    load_deadline_s: float = 10.0
    exit_s: float = 2.0
    audit: float = 0.0

    def __post_init__(self) -> None:
        if self.tiers is not None:
            given = [name for name in _STACK_FIELDS if getattr(self, name) is not None]
            if given:
                raise _at("tiers", f"given beside `{given[0]}`", "Give either one, not both")
        if self.codec not in (*CODECS, AUTO):
            known = ", ".join((*CODECS, AUTO))
            raise _at("codec", f"codec {self.codec!r} is unknown", f"Use one of {known}")
        with _blame("cold"):
            self.cold_divergence()
        for name in ("recent_tokens", "warm_tokens", "defragment_bytes"):
            if (getattr(self, name) or 0) < 0:
                problem = f"{getattr(self, name)} {name.rpartition('_')[2]}"
                raise _at(name, problem, "Use 0 or more")
        for field in ("tiers", *_EITHER):
            _check_choice(field, getattr(self, field))
        self._check_policy()
        if not 8 <= self.tokens_per_page <= 256 or self.tokens_per_page % 8:
            raise _at(
                "page_size",
                f"{self.page_size} tokens cannot be a page",
                "Use a multiple of 8 between 8 and 256",
            )
        try:
            self.graph_bytes(0)
        except ConfigError:
            problem = f"{self.graphs!r} is neither auto, off nor a size"
            raise _at("graphs", problem, "Write a size like 2GiB") from None
        if self.max_rows < 1:
            raise _at("max_rows", f"{self.max_rows} rows", "Use at least 1")
        if not 0 < self.load_deadline_s < float("inf"):
            raise _at("load_deadline_s", f"{self.load_deadline_s} seconds", "Use a positive time")
        if not 0 <= self.exit_s < float("inf"):
            raise _at("exit_s", f"{self.exit_s} seconds", "Use 0 or more")
        if not 0 <= self.audit <= 1:
            raise _at("audit", f"{self.audit} is no share", "Use 0 (none) to 1 (every page)")
        self._check_frames()
        if self.tiers is not None:  # given as a list, it could not be hashed
            msgspec.structs.force_setattr(self, "tiers", tuple(self.tiers))
        self.places()

    def _check_policy(self) -> None:
        with _blame("policy"):
            parse_policy(self.policy)
        with _blame("policy_options"):
            check_kinds(self.policy_options)
        for tenant, quota in self.quotas.items():
            with _blame(f"quotas[{tenant!r}]"):
                for kind in PLACE_KINDS:
                    parse_quota(quota, kind, None)

    def __hash__(self) -> int:
        """Return a hash over all fields except dictionaries."""
        values = (getattr(self, name) for name in self.__struct_fields__)
        return hash(tuple(value for value in values if not isinstance(value, dict)))

    def cold_divergence(self) -> float:
        """Return the divergence that pages of cold tiers may cost; 0 where they stay as they are.

        Raises:
            ConfigError: `cold` is neither empty nor kvt with such a bound.
        """
        stem = self.cold.removesuffix(":auto")
        kind, _, number = stem.partition("=")
        if stem == "kvt" or not self.cold:
            return COLD_DIVERGENCE if self.cold else 0.0
        with suppress(ValueError):
            if kind == "kvt:kl" and 0 < float(number) < 10:
                return float(number)
        raise ConfigError(f"cold={self.cold!r}", "Write kvt or kvt:kl=0.01, or one with :auto")

    def graph_bytes(self, total_bytes: int) -> int:
        """Return the bytes that graphs may hold on a device of so many bytes; 0 without graphs."""
        if self.graphs == "auto":
            return total_bytes // 16
        return 0 if self.graphs == "off" else parse_size(self.graphs, total_bytes=total_bytes)

    def selection(self, kind: str) -> Selection:
        """Return the policy of a kind of place: its name, and all its options."""
        name, options = parse_policy(self.policy)
        return Selection(name, {**options, **options_of(self.policy_options, kind)})

    def _check_frames(self) -> None:
        if not re.fullmatch(r"([0-9a-fA-F]{2}){0,64}", self.secret):
            raise _at("secret", "the value is not hex, or too long", "Use up to 128 hex digits")
        if self.integrity == "aead" and len(self.secret_bytes) < LEAST_SECRET_BYTES:
            raise _at(
                "secret",
                f"{len(self.secret_bytes)} bytes are too few to encrypt frames with",
                f"Give at least {LEAST_SECRET_BYTES} random bytes as hex; "
                "python -c 'import secrets; print(secrets.token_hex(32))' makes some",
            )

    def __repr__(self) -> str:
        """Return all fields that differ from their defaults, without secrets."""
        shown = []
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if value != ({} if field.default is msgspec.NODEFAULT else field.default):
                value = "..." if field.name == "secret" else _shown(value)
                shown.append(f"{field.name}={value!r}")
        return f"Config({', '.join(shown)})"

    @property
    def tokens_per_page(self) -> int:
        """Return `page_size`, or its default for the codec."""
        return self._tokens if self.page_size is None else self.page_size

    @property
    def raw_tokens(self) -> int:
        """Return `recent_tokens`, or its default for the codec."""
        return self._tokens if self.recent_tokens is None else self.recent_tokens

    @property
    def _tokens(self) -> int:
        return _AUTO_TOKENS if self.codec == AUTO else _TOKENS

    @property
    def secret_bytes(self) -> bytes:
        """Return the secret for `tenant_salt`."""
        return bytes.fromhex(self.secret)

    def places(self, *, on_cpu: bool = False) -> list[TierConfig]:
        """Return the stack of places, fastest first; the first is the device pool.

        Every place has a size; only remote places may have the size "", which is without limit.

        Args:
            on_cpu: Whether the layers compute on the CPU, where defaults differ.

        Raises:
            ConfigError: A place is invalid, is named twice, or is above a faster one.
        """
        stack = _listed(self.tiers) if self.tiers is not None else self._from_fields(on_cpu)
        if not stack or stack[0].kind != "gpu":
            stack.insert(0, TierConfig("gpu"))
        default = {
            "gpu": DEFAULT_CPU_POOL_SIZE if on_cpu else DEFAULT_GPU_SIZE,
            "host": DEFAULT_HOST_SIZE,
            "disk": DEFAULT_DISK_SIZE,
        }
        return [TierConfig(p.kind, p.path, p.size or default.get(p.kind, "")) for p in stack]

    def _from_fields(self, on_cpu: bool) -> list[TierConfig]:
        stack = []
        for kind, size in (("gpu", self.gpu), ("host", self.host)):
            if size is None:
                if kind == "gpu" or not on_cpu:
                    stack.append(TierConfig(kind))
                continue
            with _blame(kind):
                n_bytes = parse_size(size, total_bytes=1 << 62)
                if n_bytes:
                    stack.append(TierConfig(kind, size=str(size)))
                elif kind == "gpu":
                    raise ConfigError("a device pool of no bytes", "Give it at least a few pages")
        if self.disk is not None:
            if "://" in self.disk:
                shown = without_secrets(self.disk)
                remedy = f'Write tiers=[..., "{shown}"] instead'
                raise _at("disk", f"{shown!r} is no directory", remedy)
            with _blame("disk"):
                stack.append(parse_place("disk:" + self.disk.removeprefix("disk:")))
        return stack


def load_config(path: str | os.PathLike[str] | None = None, **overrides: object) -> Config:
    """Load the configuration from a TOML file, with keywords laid over it.

    Args:
        path: A TOML file with fields of `Config` at its top level; default the file named by the
            environment variable FLOWKV_CONFIG, or none.
        **overrides: Fields that replace the file's. None leaves the file's (or the default) value.
            `tiers` displaces `gpu`, `host` and `disk` of the file, and each of those its `tiers`.

    Raises:
        ConfigError: The file cannot be read, or a field is unknown, of a wrong type or value. The
            message names the field, such as `tiers[1]`.
    """
    path = path or os.environ.get(ENVIRONMENT) or None
    fields: dict[str, Any] = {}
    if path is not None:
        fields = _read_toml(Path(path))
        _convert(fields, where=f"{path}: ")  # so that an error in the file names the file
    given = {name: value for name, value in overrides.items() if value is not None}
    if "tiers" in given:
        displaced = set(_STACK_FIELDS)
    else:
        displaced = {"tiers"} if given.keys() & set(_STACK_FIELDS) else set()
    kept = {name: value for name, value in fields.items() if name not in displaced}
    return _convert(kept | given)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path.expanduser()) as file:
            return tomllib.load(file)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(
            f"the configuration file {path} cannot be read ({reason})",
            f"Correct the path, or unset {ENVIRONMENT}",
        ) from error
    except MALFORMED as error:
        raise ConfigError(f"{path} is not TOML ({error})", "Correct that line") from error


def _convert(fields: Mapping[str, Any], where: str = "") -> Config:
    known = Config.__struct_fields__
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            remedy = f"Did you mean `{close[0]}`" if close else f"Fields are {', '.join(known)}"
            raise ConfigError(f"{where}`{name}` is not a field", remedy)
    for name, value in fields.items():
        _check_choice(name, value, where)
    try:
        return msgspec.convert(dict(fields), Config)
    except msgspec.ValidationError as error:
        if isinstance(cause := error.__cause__, ConfigError):  # raised by __post_init__
            raise ConfigError(where + cause.problem, cause.remedy) from None
        problem, _, place = str(error).partition(" - at ")
        problem = problem.replace("null", "None").replace("array", "list").replace("object", "dict")
        said = f"{where}{place.replace('$.', '')}: {problem[:1].lower()}{problem[1:]}"
        raise ConfigError(said, "See help(Config) for the field's values") from None


def _check_choice(name: str, value: object, where: str = "") -> None:
    """Check a field that has one of a few values, and that a list of places is one.

    Raises:
        ConfigError: It has another value; the values are listed.
    """
    allowed = _EITHER.get(name)
    if allowed and value not in allowed and not isinstance(value, dict):
        remedy = f"Use one of {', '.join(allowed)}"
        raise ConfigError(f"{where}`{name}`: {value!r} is unknown", remedy)
    if name == "tiers" and isinstance(value, str):
        shown = without_secrets(value)
        remedy = f'Write tiers=["{shown}"]'
        raise ConfigError(f"{where}`tiers`: {shown!r} is one text, but a list is needed", remedy)


def _listed(tiers: tuple[str, ...]) -> list[TierConfig]:
    stack: list[TierConfig] = []
    ranks = {kind: rank for rank, kind in enumerate(LOCAL_KINDS)}
    for i, text in enumerate(tiers):
        with _blame(f"tiers[{i}]"):
            place = parse_place(text)
            for above in stack:
                same_path = os.path.normpath(above.path) == os.path.normpath(place.path)
                if same_path and above.kind == place.kind:
                    shown = without_secrets(text)
                    raise ConfigError(f"place {shown!r} is named twice", "Name it once")
            if stack and ranks.get(place.kind, 3) < ranks.get(stack[-1].kind, 3):
                upper, lower = without_secrets(str(stack[-1])), without_secrets(text)
                raise ConfigError(
                    f"place {lower!r} lies below the slower {upper!r}",
                    "List gpu, host, disks and remote stores in this order",
                )
            stack.append(place)
    return stack


def _shown(value: Any) -> Any:
    """Return a field's value without the secrets of the URIs in it."""
    if isinstance(value, str):
        return without_secrets(value)
    return tuple(map(_shown, value)) if isinstance(value, tuple) else value


def _at(field: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"`{field}`: {problem}", remedy)


@contextmanager
def _blame(field: str) -> Iterator[None]:
    """Name the field in an error that is raised within."""
    try:
        yield
    except FlowKVError as error:
        raise _at(field, error.problem, error.remedy) from None
