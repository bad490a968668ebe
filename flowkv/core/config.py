"""Everything a cache can be told, from Python keywords or a TOML file, checked in one place.

What is not said is chosen so: the device pool takes 25% of the device's memory (2 GiB where layers
compute on the CPU), a host tier may grow to 25% of the machine's memory (none where layers compute
on the CPU: the pool lies there already), and nothing is written to disk.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from flowkv.core.errors import ConfigError, FlowKVError
from flowkv.core.layout import CODECS
from flowkv.core.selection import (
    PLACE_KINDS,
    Selection,
    check_kinds,
    options_of,
    parse_policy,
    parse_quota,
)
from flowkv.core.sizes import LOCAL_KINDS, Place, parse_place, parse_size, without_secrets

ENVIRONMENT = "FLOWKV_CONFIG"
DEFAULT_GPU_SIZE = "25%"
DEFAULT_CPU_POOL_SIZE = "2GiB"
DEFAULT_HOST_SIZE = "25%"
DEFAULT_DISK_SIZE = "10%"
AUTO = "auto"
LEAST_SECRET_BYTES = 16
_STACK_FIELDS = ("gpu", "host", "disk")
_PAGE_SIZE, _AUTO_PAGE_SIZE = 64, 128
_RECENT_TOKENS, _AUTO_RECENT_TOKENS = 64, 128


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
        codec: How pages are encoded once they are full: "raw" (exact), "kv8", "k8v4", "kv4c" or
            "kv4h", or "auto": "kv8", and "kv4c" further back.
        recent_tokens: Tokens at the end of each open sequence whose pages stay raw, besides the
            page that is being filled; default 128 for "auto", 64 for other codecs.
        warm_tokens: Tokens before these whose pages "auto" leaves at 8 bits.
        non_finite: What happens to a full page that no codec can hold, as it has NaN, infinity or
            numbers beyond float16's scales: it stays "raw", with a warning, or raises an "error".
        policy: Name of the policy that chooses what each place keeps, with options if need be:
            "auto", "lru", "lfu-ttl:tau_s=30".
        policy_options: Fields of its configuration. Under "gpu", "host", "disk" and "remote": those
            of these places only, as in `{"gpu": {"lease_s": 600}, "host": {"lease_s": 1800}}`.
        quotas: What tenants may take of each place, by name: "2GiB:8GiB" keeps 2 GiB from being
            taken by others and allows 8 GiB at most; "8GiB" is a limit alone, "10%:50%" are shares
            of each place, and `{"gpu": "1GiB:", "disk": ":50%"}` tells places apart.
        prefetch: "auto" brings pages onto their device before they are asked for: for requests that
            wait, hints, and what policies learned, where these were right. Fields of
            `flowkv.policy.prefetch.PrefetchConfig` do so with other values; "off" brings only what
            `KV.prefetch` and `KV.enqueue` ask for.
        learned: Keep what policies learned in a disk tier's directory, so that the next process
            starts with it. It names no prompt and no tenant.
        record: File to which requests are written as a trace, with salted ids only; "" for none.
        page_size: Tokens per page, a multiple of 8 between 8 and 256; default 64, 128 for "auto".
        tenant: Tenant of requests that name none. Tenants never share pages.
        namespace: Replaces the model's own identity; two caches with equal namespaces share pages.
        secret: Up to 64 bytes as hex that go into every key, so that keys cannot be guessed from
            known text, and into those of `integrity="aead"`; "" for none.
        integrity: How frames on lasting tiers are checked: "xxh3" finds every accident; "aead"
            encrypts them for each tenant (AES-256-GCM), so that nobody without the secret reads,
            makes or changes one. Needs a `secret` of at least 16 bytes and `flowkv[aead]`.
        lossless: "auto" compresses frames of 16-bit pages on lasting tiers, without loss, where
            that was measured to be faster; "off" never does.
        exclusive: Refuse a store directory that another process writes, instead of reading it only.
        durability: "sync" flushes every written page to the medium; "none" leaves that to the
            operating system, and a power cut loses the latest pages.
        write_back: Write filled pages down the tiers in the background, before they are evicted.
        defragment_bytes: Most bytes moved within the device pool at the end of a step, where free
            memory lies scattered between pages of several sizes; 0 for never.
        max_rows: Most sequences in one step.
        load_deadline_s: Longest wait for a page before it is computed instead.
        audit: Share of restored pages, 0 to 1, that are recomputed and compared with what was
            restored; what is wrong is forgotten everywhere, and told. 0.01 costs about as much as
            recomputing a hundredth of what is restored.
    """

    gpu: int | str | None = None
    host: int | str | None = None
    disk: str | None = None
    tiers: tuple[str, ...] | None = None
    codec: str = "raw"
    recent_tokens: int | None = None
    warm_tokens: int = 256
    non_finite: Literal["raw", "error"] = "raw"
    policy: str = "auto"
    policy_options: dict[str, Any] = {}
    quotas: dict[str, str | dict[str, str]] = {}
    prefetch: Literal["auto", "off"] | dict[str, Any] = "auto"
    learned: bool = True
    record: str = ""
    page_size: int | None = None
    tenant: str = ""
    namespace: str = ""
    secret: str = ""
    integrity: Literal["xxh3", "aead"] = "xxh3"
    lossless: Literal["auto", "off"] = "auto"
    exclusive: bool = False
    durability: Literal["none", "sync"] = "none"
    write_back: bool = True
    defragment_bytes: int = 16 << 20
    max_rows: int = 256
    load_deadline_s: float = 10.0
    audit: float = 0.0

    def __post_init__(self) -> None:
        if self.tiers is not None:
            given = [name for name in _STACK_FIELDS if getattr(self, name) is not None]
            if given:
                raise _at("tiers", f"given beside `{given[0]}`", "Give either one, not both")
        if self.codec not in (*CODECS, AUTO):
            known = ", ".join((*CODECS, AUTO))
            raise _at("codec", f"codec {self.codec!r} is unknown", f"Use one of {known}")
        for name in ("recent_tokens", "warm_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise _at(name, f"{getattr(self, name)} tokens", "Use 0 or more")
        if self.defragment_bytes < 0:
            raise _at("defragment_bytes", f"{self.defragment_bytes} bytes", "Use 0 or more")
        if self.non_finite not in ("raw", "error"):
            raise _at("non_finite", f"{self.non_finite!r} is unknown", "Use raw or error")
        if not isinstance(self.prefetch, dict) and self.prefetch not in ("auto", "off"):
            raise _at("prefetch", f"{self.prefetch!r} is unknown", "Use auto, off, or its fields")
        self._check_policy()
        if not 8 <= self.tokens_per_page <= 256 or self.tokens_per_page % 8:
            raise _at(
                "page_size",
                f"{self.page_size} tokens cannot be a page",
                "Use a multiple of 8 between 8 and 256",
            )
        if self.max_rows < 1:
            raise _at("max_rows", f"{self.max_rows} rows", "Use at least 1")
        if not 0 < self.load_deadline_s < float("inf"):
            raise _at("load_deadline_s", f"{self.load_deadline_s} seconds", "Use a positive time")
        if not 0 <= self.audit <= 1:
            raise _at("audit", f"{self.audit} is no share", "Use 0 (none) to 1 (every page)")
        if self.durability not in ("none", "sync"):
            raise _at("durability", f"{self.durability!r} is unknown", "Use none or sync")
        self._check_frames()
        if self.tiers is not None:  # given as a list, it could not be hashed
            msgspec.structs.force_setattr(self, "tiers", tuple(self.tiers))
        self.places()

    def _check_policy(self) -> None:
        with _Blame("policy"):
            parse_policy(self.policy)
        with _Blame("policy_options"):
            check_kinds(self.policy_options)
        for tenant, quota in self.quotas.items():
            with _Blame(f"quotas[{tenant!r}]"):
                for kind in PLACE_KINDS:
                    parse_quota(quota, kind, None)

    def __hash__(self) -> int:
        """Of all fields but those that are dictionaries."""
        values = (getattr(self, name) for name in self.__struct_fields__)
        return hash(tuple(value for value in values if not isinstance(value, dict)))

    def selection(self, kind: str) -> Selection:
        """The policy of a kind of place: its name, and all its options."""
        name, options = parse_policy(self.policy)
        return Selection(name, {**options, **options_of(self.policy_options, kind)})

    def _check_frames(self) -> None:
        if not re.fullmatch(r"([0-9a-fA-F]{2}){0,64}", self.secret):
            raise _at("secret", "the value is not hex, or too long", "Use up to 128 hex digits")
        if self.integrity not in ("xxh3", "aead"):
            raise _at("integrity", f"{self.integrity!r} is unknown", "Use xxh3 or aead")
        if self.lossless not in ("auto", "off"):
            raise _at("lossless", f"{self.lossless!r} is unknown", "Use auto or off")
        if self.integrity == "aead" and len(self.secret_bytes) < LEAST_SECRET_BYTES:
            raise _at(
                "secret",
                f"{len(self.secret_bytes)} bytes are too few to encrypt frames with",
                f"Give at least {LEAST_SECRET_BYTES} random bytes as hex; "
                "python -c 'import secrets; print(secrets.token_hex(32))' makes some",
            )

    def __repr__(self) -> str:
        """All fields that differ from their defaults; no secret is shown, nor one of a URI."""
        shown = []
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if value != ({} if field.default is msgspec.NODEFAULT else field.default):
                value = "..." if field.name == "secret" else _shown(value)
                shown.append(f"{field.name}={value!r}")
        return f"Config({', '.join(shown)})"

    @property
    def tokens_per_page(self) -> int:
        """`page_size`, or its default for the codec."""
        default = _AUTO_PAGE_SIZE if self.codec == AUTO else _PAGE_SIZE
        return default if self.page_size is None else self.page_size

    @property
    def raw_tokens(self) -> int:
        """`recent_tokens`, or its default for the codec."""
        default = _AUTO_RECENT_TOKENS if self.codec == AUTO else _RECENT_TOKENS
        return default if self.recent_tokens is None else self.recent_tokens

    @property
    def secret_bytes(self) -> bytes:
        """The secret for `tenant_salt`."""
        return bytes.fromhex(self.secret)

    def places(self, *, on_cpu: bool = False) -> list[Place]:
        """The stack of places, fastest first; the first is the device pool, every one has a size.

        Only remote places may have the size "", which is without limit.

        Args:
            on_cpu: Whether the layers compute on the CPU, where defaults differ.

        Raises:
            ConfigError: A place is none, is named twice, or lies above a faster one.
        """
        if self.tiers is not None:
            stack = _listed(self.tiers)
        else:
            stack = self._from_fields(on_cpu)
        if not stack or stack[0].kind != "gpu":
            stack.insert(0, Place("gpu"))
        default = {
            "gpu": DEFAULT_CPU_POOL_SIZE if on_cpu else DEFAULT_GPU_SIZE,
            "host": DEFAULT_HOST_SIZE,
            "disk": DEFAULT_DISK_SIZE,
        }
        return [Place(p.kind, p.path, p.size or default.get(p.kind, "")) for p in stack]

    def _from_fields(self, on_cpu: bool) -> list[Place]:
        stack = []
        for kind, size in (("gpu", self.gpu), ("host", self.host)):
            if size is None:
                if kind == "gpu" or not on_cpu:
                    stack.append(Place(kind))
                continue
            with _Blame(kind):
                n_bytes = parse_size(size, total_bytes=1 << 62)
                if n_bytes:
                    stack.append(Place(kind, size=str(size)))
                elif kind == "gpu":
                    raise ConfigError("a device pool of no bytes", "Give it at least a few pages")
        if self.disk is not None:
            if "://" in self.disk:
                shown = without_secrets(self.disk)
                remedy = f'Write tiers=[..., "{shown}"] instead'
                raise _at("disk", f"{shown!r} is no directory", remedy)
            with _Blame("disk"):
                stack.append(parse_place("disk:" + self.disk.removeprefix("disk:")))
        return stack


def load_config(path: str | os.PathLike[str] | None = None, **overrides: object) -> Config:
    """Configuration from a TOML file, with keywords laid over it.

    Args:
        path: A TOML file whose top level holds fields of `Config`; default the file named by the
            environment variable FLOWKV_CONFIG, or none.
        **overrides: Fields that replace the file's. None leaves the file's (or the default) value.
            `tiers` displaces `gpu`, `host` and `disk` of the file, and each of those its `tiers`.

    Raises:
        ConfigError: The file cannot be read, or a field is unknown, of a wrong type or value. The
            message names the field, such as `$.tiers[1]`.
    """
    path = path or os.environ.get(ENVIRONMENT) or None
    fields: dict[str, Any] = {}
    if path is not None:
        fields = _read_toml(Path(path))
        _convert(fields, where=f"{path}: ")  # so that a fault of the file is blamed on the file
    given = {name: value for name, value in overrides.items() if value is not None}
    if "tiers" in given:
        displaced = set(_STACK_FIELDS)
    else:
        displaced = {"tiers"} if given.keys() & set(_STACK_FIELDS) else set()
    kept = {name: value for name, value in fields.items() if name not in displaced}
    return _convert(kept | given)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.expanduser().open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(
            f"the configuration file {path} cannot be read ({reason})",
            f"Correct the path, or unset {ENVIRONMENT}",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML ({error})", "Correct that line") from error


def _convert(fields: Mapping[str, Any], where: str = "") -> Config:
    known = Config.__struct_fields__
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            remedy = f"Did you mean `$.{close[0]}`" if close else f"Fields are {', '.join(known)}"
            raise ConfigError(f"{where}`$.{name}` is not a field", remedy)
    try:
        return msgspec.convert(dict(fields), Config)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):  # raised by __post_init__
            cause = error.__cause__
            raise ConfigError(where + cause.problem, cause.remedy) from None
        problem, _, place = str(error).partition(" - at ")
        raise ConfigError(
            f"{where}{place or '`$`'}: {problem[:1].lower()}{problem[1:]}",
            "See help(Config) for what the field takes",
        ) from None


def _listed(tiers: tuple[str, ...]) -> list[Place]:
    stack: list[Place] = []
    ranks = {kind: rank for rank, kind in enumerate(LOCAL_KINDS)}
    for i, text in enumerate(tiers):
        with _Blame(f"tiers[{i}]"):
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
    """A field's value without the secrets of the URIs in it."""
    if isinstance(value, str):
        return without_secrets(value)
    return tuple(map(_shown, value)) if isinstance(value, tuple) else value


def _at(field: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"`$.{field}`: {problem}", remedy)


class _Blame:
    """Names the field in an error that is raised below."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, FlowKVError):
            raise _at(self.field, error.problem, error.remedy) from None
