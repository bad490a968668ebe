"""`memo` caches the results of an encoder by content, row by row of a batch.

    encoder = flowkv.memo(encoder, places="host:256MiB")
    features = encoder(pixel_values)            # rows seen before are loaded, the rest is computed

A row is named by the computation (`naming.identity`, as K and V are) and by the bytes, dtype and
shape of its inputs. It is stored in tiers as one verified frame (`residency.keeper`); rows that are
missing, late, damaged or too old are computed, all of a call in one smaller batch.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from flowkv.core.clock import Clock
from flowkv.core.config import Config
from flowkv.core.errors import ConfigError, StateError, StoreError, UnsupportedModelError
from flowkv.core.files import renew_lock
from flowkv.core.interrupts import cover
from flowkv.core.keys import tenant_salt
from flowkv.core.signatures import parameters_of
from flowkv.kernels.operands import GPUS
from flowkv.naming.fingerprint import UnnamedError, version_of
from flowkv.naming.identity import SMALL_BYTES, Identity, drawn, modes, transformed
from flowkv.observe.events import Closing, Remembered
from flowkv.residency.keeper import LONG_S, Caller, Keeper, open_keeper
from flowkv.tensors.nested import (
    LeafInfo,
    StoredRow,
    bytes_by_row,
    count_rows,
    decode_row,
    info_of,
    joined,
    put,
    rows_of,
    take,
)
from flowkv.tensors.write_behind import PART_BYTES, WriteBehind, answers_of, stripes_of
from flowkv.tiers import FrameInfo, Load, Outcome

_TAG = b"flowkv.memo/1\0\0\0"
_ROWS = b"flowkv.memo/2\0\0\0"  # earlier names may stand for wrong rows (SECURITY.md)
_LEAST_S = 0.002
_REST_S = 1.0  # pause of loads after tiers were late
_POLL_S = 0.001
_MOST_SIZES = 1024
_OPEN: weakref.WeakSet[Memo] = weakref.WeakSet()


class _WallClock:
    """Wall clock, which other processes share: rows outlive this process."""

    now_ns = staticmethod(time.time_ns)


class _Called(torch.nn.Module):
    """Function as a module, so that it is named like modules."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class _Part(NamedTuple):
    """Tenant of a call."""

    salt: bytes
    tenant: str


class _Question:
    """Arguments of a call, and the names of its rows.

    Attributes:
        arguments: Form of the arguments, a dict.
        leaves: Their leaves.
        batched: Indices of the leaves with rows.
        rows: Number of rows.
        unclear: An argument with rows has a list that may hold one item for each.
        devices: Device of the first leaf on each type of device.
        head: Digest of all that the rows share, besides the computation.
    """

    def __init__(
        self, arguments: dict[str, Any], batch: bool | Collection[str], places: Collection[str] = ()
    ) -> None:
        self.leaves: list[Any] = []
        self.batched: set[int] = set()
        forms, in_rows = [], []
        for name, value in arguments.items():
            first = len(self.leaves)
            chosen = batch is True or (batch is not False and name in batch)
            forms.append(take(value, self.leaves, texts=chosen))
            if chosen:
                in_rows.append(forms[-1])
                self.batched.update(range(first, len(self.leaves)))
        self.arguments = ["dict", [*arguments], forms]
        if any(map(_classes, forms)):
            raise UnnamedError("of a class with code of its own, which no name covers")
        counts = {count_rows(self.leaves[i]) for i in self.batched}
        counts = counts or {0 for form in in_rows if form[1:] == [[]]}  # no text, in no type
        if batch is not False and (len(counts) != 1 or -1 in counts):
            raise ConfigError(
                f"inputs have {sorted(counts)} rows",
                "Name those that have one row for each result, as in batch=('input_ids',), or "
                "pass batch=False to remember whole calls",
            )
        self.rows = counts.pop() if counts else 1
        self.unclear = self.rows > 1 and any(_may_be_rows(form, self.rows) for form in in_rows)
        self.devices: dict[str, torch.device] = {}
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                self.devices.setdefault(leaf.device.type, leaf.device)
        self.infos = [info_of(leaf, rows=i in self.batched) for i, leaf in enumerate(self.leaves)]
        kinds = sorted({*self.devices, *places, torch.get_default_device().type, "cpu"})
        able = filter(torch.amp.is_autocast_available, sorted({*kinds, *GPUS}))
        on = filter(torch.is_autocast_enabled, able)  # a function may move its inputs
        casts = [(kind, str(torch.get_autocast_dtype(kind))) for kind in on]
        dtype = str(torch.get_default_dtype())
        said = msgspec.msgpack.encode(
            [self.arguments, sorted(self.batched), self.infos, casts, kinds, dtype]
        )
        self.head = hashlib.sha256(said)
        for i, leaf in enumerate(self.leaves):
            if i not in self.batched:
                self.head.update(bytes_by_row(leaf, rows=False)[0])

    def keys(self, name: bytes, salt: bytes) -> list[bytes]:
        """Return the name of each row, unique over all computations and tenants."""
        base = hashlib.sha256(_ROWS + name + salt + self.head.digest())
        states = [base.copy() for _ in range(self.rows)]
        for i in sorted(self.batched):
            for state, row in zip(states, bytes_by_row(self.leaves[i], rows=True), strict=True):
                state.update(row)
        return [state.digest() for state in states]

    def some(self, index: Sequence[int]) -> list[Any]:
        """Return the leaves for some of the rows."""
        return [
            rows_of(leaf, index) if i in self.batched else leaf
            for i, leaf in enumerate(self.leaves)
        ]


class Memo(Closing):
    """Function or module with cached results; `flowkv.memo` makes it. Thread-safe.

    Attributes:
        keeper: The keeper of the rows.
        bus: Bus of events: `Remembered` of each call, and events of tiers.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        keeper: Keeper,
        *,
        key: str | Callable[[], str] | None = None,
        ttl: float | None = None,
        tenant: str = "",
        batch: bool | Collection[str] = True,
        clock: Clock | None = None,
        secret: bytes = b"",
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self.keeper, self.bus = keeper, keeper.bus
        self._function, self._key, self._ttl_ns = function, key, _nanoseconds(ttl)
        self._batch = (batch,) if isinstance(batch, str) else batch
        self._clock, self._secret, self._mine = clock or _WallClock(), secret, False
        self._part = self._part_of(tenant)
        self._lock, self._counts = threading.RLock(), Counter[str]()
        renew_lock(self, self._lock)
        self._declined = Counter[str]()
        self._root = _root(function)
        called = getattr(function, "forward", function)
        self._positional, self._known = _parameters(called)
        label = getattr(called, "__qualname__", type(function).__qualname__)
        module = getattr(called, "__module__", "builtins")
        self.name = key if isinstance(key, str) else f"{module}.{label}"
        self._layout = hashlib.sha256(_TAG + self.name.encode()).digest()[:16]
        self._sizes: dict[bytes, int] = {}
        self._rows = WriteBehind(keeper, self._proven)
        self._epoch = self._forgets = 0
        self._rest_until_s, self._named, self._changed = 0.0, b"", False
        self._pid = os.getpid()
        self._target = function if isinstance(function, torch.nn.Module) else _Called(function)
        self._identity = None if key is not None else self._identify()
        _OPEN.add(self)

    def _identify(self) -> Identity:
        identity = Identity(self._target)
        if why := identity.foreign or identity.compiled * "parts of it are compiled":
            raise UnsupportedModelError(
                f"{self.name} cannot be named by its content ({why})",
                "Pass key='...', a name that you change whenever the computation changes",
            )
        return identity

    def _part_of(self, tenant: str) -> _Part:
        return _Part(tenant_salt(tenant, self._secret), tenant)

    # ---- use

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result, without computing cached rows again.

        Raises:
            ConfigError: Inputs have different numbers of rows.
            UnsupportedModelError: The result does not have one row for each row of the inputs, or
                an input is neither a tensor, an array, text nor a plain value.
        """
        return self._call(self._part, args, kwargs)

    def tenant(self, name: str) -> Callable[..., Any]:
        """Return the function for one tenant, with rows of its own."""
        part = self._part_of(name)
        return lambda *args, **kwargs: self._call(part, args, kwargs)

    def stats(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON.

        `rows` of all `calls` were `found`, `computed`, or equal to another one of their call
        (`duplicates`). `declined` counts calls that were only computed, by reason; `expired` rows
        were too old, `late` ones did not come in time, `dropped` ones were not stored because the
        queue was full.
        """
        with self._lock:
            names = ("calls", "rows", "found", "computed", "duplicates", "expired", "late")
            held: dict[str, Any] = {name: self._counts[name] for name in names}
            held["declined"] = dict(self._declined)
        return {
            **held,
            "dropped": self._rows.dropped,
            "pending_bytes": self._rows.pending_bytes,
            **self.keeper.report(),
        }

    def flush(self) -> bool:
        """Wait, at most ten seconds, until all rows are in the tiers; return whether they are."""
        return os.getpid() == self._pid and self._rows.flush()

    def forget(self, *args: Any, **kwargs: Any) -> int:
        """Erase the rows of these inputs, or without inputs all rows of this tenant.

        With inputs, rows of the present computation are erased; without, also those of earlier
        ones. Calls that began before the method returned store nothing.

        Returns:
            Number of erased frames.

        Raises:
            StateError: With inputs: rows cannot be named now, for instance as the module trains.
                In a forked process: the rows are its parent's.
            StoreError: Some rows may still be stored; the message has the tier and the reason.
        """
        if os.getpid() != self._pid:
            problem = "the memo was opened by the parent process"
            raise StateError(problem, "Forget there, or make another memo in this process")
        with self._lock:
            self._forgets += 1
        try:
            return self._erase(args, kwargs)
        finally:
            with self._lock:
                self._forgets, self._epoch = self._forgets - 1, self._epoch + 1

    def _erase(self, args: Any, kwargs: Any) -> int:
        if not self._rows.flush():
            raise StoreError(
                f"rows of {self.name} are still being stored", "Forget again once the tiers answer"
            )
        caller = self.keeper.caller()
        if args or kwargs:
            try:
                keys = self._question(args, kwargs).keys(self._may_answer(), self._part.salt)
            except _Declined as why:
                raise StateError(
                    f"rows of {self.name} cannot be named now ({why})",
                    "Call forget() without inputs, or name them as when they were computed",
                ) from None
        else:
            own = self._layout, self._part.salt
            keys = [e.key for e in caller.scan() if (e.info.layout, e.info.tenant) == own]
        return caller.erase([*dict.fromkeys(keys)])

    def close(self) -> None:
        """Store queued rows, and close the places that the memo opened. Safe to call again."""
        if os.getpid() != self._pid:
            return
        self._rows.close()
        if self._mine:
            self.keeper.close()

    # ---- a call

    def _call(self, part: _Part, args: Any, kwargs: Any) -> Any:
        # Places and threads belong to the parent; compiled code cannot look rows up.
        if torch.compiler.is_compiling() or os.getpid() != self._pid:
            return self._function(*args, **kwargs)
        began_s = time.perf_counter()
        cover()
        try:
            found = self._answer(part, args, kwargs)
        except _Declined as why:
            with self._lock:
                self._declined[str(why)] += 1
            return self._function(*args, **kwargs)
        result, rows, counts = found
        with self._lock:
            self._counts.update(calls=1, rows=rows, **counts)
        if self.bus.wants(Remembered):
            told = {name: counts[name] for name in ("found", "computed")}
            seconds = time.perf_counter() - began_s
            self.bus.emit(
                Remembered(name=self.name, rows=rows, seconds=seconds, tenant=part.tenant, **told)
            )
        return result

    def _answer(self, part: _Part, args: Any, kwargs: Any) -> tuple[Any, int, dict[str, int]]:
        name = self._may_answer()
        question = self._question(args, kwargs)
        if not question.rows:
            raise _Declined("no rows")
        if question.unclear:
            raise _Declined("lists")
        if torch.is_grad_enabled() and self._wants_grad(question.leaves):
            raise _Declined("gradients")
        epoch = self._epoch
        keys = question.keys(name, part.salt)
        rows = self._find(name, question, keys)
        if rows and not self._same_content():  # weights were written to without a count
            return self._answer(part, args, kwargs)
        first = {key: i for i, key in reversed([*enumerate(keys)])}
        missing = sorted(i for key, i in first.items() if key not in rows)
        found = sum(key in rows for key in keys)
        counts = {"found": found, "computed": len(missing)}
        counts["duplicates"] = len(keys) - found - len(missing)
        if not _alike([*rows.values()]):
            missing = [*range(len(keys))]
        if not missing:
            try:
                return self._joined(question, keys, rows), len(keys), counts
            except (TypeError, ValueError):  # a class or dtype of the rows is not loaded
                missing = [*range(len(keys))]
        result, fresh = self._compute(question, missing, args, kwargs)
        if fresh is None:  # the result is for all rows, and must not be stored
            return result, len(keys), {"found": 0, "computed": len(keys), "duplicates": 0}
        form, infos, leaves = fresh
        made = self._made([keys[i] for i in missing], form, infos, leaves)
        self._learn_size(question, next(iter(made.values())))
        if self._still(name) and self._same_content():  # also checks writes without a count
            with self._lock:  # rows of calls from before the end of a `forget` are not stored
                if epoch == self._epoch and not self._forgets:
                    self._rows.add(made, self._info(name, part.salt))
        if len(missing) == len(keys):
            return result, len(keys), {"found": 0, "computed": len(keys), "duplicates": 0}
        if _alike([*rows.values(), *made.values()]):
            with contextlib.suppress(TypeError, ValueError):
                return self._joined(question, keys, rows, made, leaves), len(keys), counts
        whole = self._function(*args, **kwargs)
        return whole, len(keys), {"found": 0, "computed": len(keys), "duplicates": 0}

    def _may_answer(self) -> bytes:
        """Return the present name of the computation.

        Raises:
            _Declined: Rows may not be reused or stored now.
        """
        if self._root is not None and any(one.training for one in self._root.modules()):
            raise _Declined("training")
        if why := modes() or transformed():
            raise _Declined(why)
        if not self.keeper.open:
            raise _Declined("closed")
        if name := self._name():
            return name
        raise _Declined("unnamed")

    def _name(self) -> bytes:
        """Return 32 bytes unique to the computation; empty if it cannot be named now."""
        if self._key is not None:
            said = self._key if isinstance(self._key, str) else self._key()
            # Rows of a function that were computed without gradients must not replace others.
            mode = b"grad" if self._root is None and torch.is_grad_enabled() else b"key"
            return hashlib.sha256(_TAG + mode + said.encode("utf-8", "surrogatepass")).digest()
        identity = self._identity
        assert identity is not None
        with self._lock:
            try:
                if not identity.same(self._target) or self._changed:
                    identity.read(self._target, anew=self._changed)
                    self._changed = False
            except UnsupportedModelError:
                return b""
            if identity.training:
                raise _Declined("training")
            if identity.foreign:
                return b""
            self._named = identity.namespace.digest()
            return self._named

    def _question(self, args: Any, kwargs: Any) -> _Question:
        arguments = dict(zip(self._names(len(args)), args, strict=False)) | kwargs
        if len(arguments) < len(args) + len(kwargs):
            raise _Declined("arguments")  # the function itself raises the error
        try:
            tensors = () if self._root is None else self._root.parameters()
            places = {tensor.device.type for tensor in tensors}
            known = {name: arguments.pop(name) for name in self._known if name in arguments}
            named = known | arguments  # the order of names that a function collects may count
            return _Question(named, self._batch, places)
        except UnnamedError as error:
            raise UnsupportedModelError(
                f"an input of {self.name} is {error}",
                "Pass tensors, arrays, texts and plain values, in tuples, lists or dicts",
            ) from None

    def _names(self, count: int) -> list[str]:
        """Return the names of so many arguments that are passed by position."""
        names = [*self._positional, *(f"*{i}" for i in range(len(self._positional), count))]
        return names[:count]

    def _wants_grad(self, leaves: Sequence[Any]) -> bool:
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            return True
        if self._root is not None and any(p.requires_grad for p in self._root.parameters()):
            return True
        return self._identity is not None and self._identity.trains

    # ---- computing

    def _compute(
        self, question: _Question, missing: Sequence[int], args: Any, kwargs: Any
    ) -> tuple[Any, tuple[Any, tuple[LeafInfo, ...], list[Any]] | None]:
        """Compute some rows; return the result, and its parts if they may be stored."""
        whole = len(missing) == question.rows
        asks = self._identity is None or self._identity.draws
        first, named = args, kwargs
        if not whole:
            named = put(question.arguments, iter(question.some(missing)))
            first = [named.pop(name) for name in self._names(len(args))]
        inputs, before, began_s = _state(first, named), drawn() if asks else (), time.perf_counter()
        result = self._function(*first, **named)
        seconds = time.perf_counter() - began_s
        form, infos, leaves = self._parts_of(result, len(missing))
        self.keeper.gate.computed(len(missing), seconds)
        why = "random" if asks and before != drawn() else ""
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            why = "gradients"
        if inputs != _state(first, named):
            why = "writes to inputs"
        try:
            put(form, iter(leaves))
        except (TypeError, ValueError):  # a class that cannot be made of its fields
            why = why or "class"
        if why:
            with self._lock:
                self._declined[why] += 1
            return (result if whole else self._function(*args, **kwargs)), None
        return result, (form, infos, leaves)

    def _parts_of(self, result: Any, count: int) -> tuple[Any, tuple[LeafInfo, ...], list[Any]]:
        """Return the form of a result with so many rows, its leaves, and their descriptions.

        Raises:
            UnsupportedModelError: The result has other rows, or parts without bytes.
        """
        leaves, rows = list[Any](), self._batch is not False
        try:
            form = take(result, leaves)
            infos = tuple(info_of(leaf, rows=rows) for leaf in leaves)
        except UnnamedError as error:
            raise UnsupportedModelError(
                f"the result of {self.name} holds {error}", "Return tensors or arrays"
            ) from None
        counts = {count_rows(leaf) for leaf in leaves} if rows else {count}
        if counts != {count} or (rows and not _bare(form)):
            raise UnsupportedModelError(
                f"the result of {self.name} has {sorted(counts)} rows for {count} of its inputs, or"
                " holds lists or plain values",
                "Return one row for each and nothing else, or pass batch=False",
            )
        return form, infos, leaves

    def _made(
        self, keys: Sequence[bytes], form: Any, infos: tuple[LeafInfo, ...], leaves: Sequence[Any]
    ) -> dict[bytes, StoredRow]:
        """Return computed rows, copied, since the caller may write to the result."""
        rows, now = self._batch is not False, self._clock.now_ns()
        parts = [bytes_by_row(leaf, rows=rows, own=True) for leaf in leaves]
        return {
            key: StoredRow(form, infos, now, [part[i] for part in parts])
            for i, key in enumerate(keys)
        }

    def _still(self, name: bytes) -> bool:
        """Return whether the computation is the same as when the call began, own writes aside."""
        identity = self._identity
        if identity is None:
            return True
        with self._lock:
            try:
                return identity.kept(self._target) and identity.namespace.digest() == name
            except UnsupportedModelError:
                return False

    def _same_content(self) -> bool:
        """Return whether weights are unchanged by content: writes may be uncounted."""
        identity = self._identity
        if identity is None:
            return True
        with self._lock:
            small = identity.n_bytes <= SMALL_BYTES
            self._changed |= not (identity.same_content() if small else identity.roll(0.0))
            return not self._changed

    def _proven(self, name: bytes) -> bool:
        """Return whether all weights, read from the beginning, still fit a name."""
        identity = self._identity
        if identity is None:
            return True
        with self._lock:
            if name != self._named or self._changed:
                return False
            identity.weights.restart()
            passes = identity.weights.passes
        while True:
            with self._lock:
                if name != self._named or self._changed or not identity.roll(0.0):
                    self._changed |= name == self._named
                    return False
                if identity.weights.passes > passes:
                    return True

    # ---- tiers

    def _info(self, name: bytes, salt: bytes) -> FrameInfo:
        zeros = bytes(32)
        return FrameInfo("memo", 0, 0, self._layout, zeros, name, 0, 1, 1, tenant=salt)

    def _find(
        self, name: bytes, question: _Question, keys: Sequence[bytes]
    ) -> dict[bytes, StoredRow]:
        """Return the cached rows that came in time."""
        wanted = [*dict.fromkeys(keys)]
        rows = {key: row for key in wanted if (row := self._rows.get(key)) is not None}
        wanted = [key for key in wanted if key not in rows]
        if wanted and time.monotonic() >= self._rest_until_s:
            with contextlib.suppress(StateError):  # closed meanwhile
                rows |= self._load(self.keeper.caller(), question, wanted)
        old = [key for key, row in rows.items() if self._too_old(row)]
        if old:
            self._rows.flush(LONG_S)
            self.keeper.caller().delete(old)
            with self._lock:
                self._counts["expired"] += len(old)
        return {key: row for key, row in rows.items() if key not in old}

    def _too_old(self, row: StoredRow) -> bool:
        age_ns = self._clock.now_ns() - row.made_ns
        return self._ttl_ns is not None and not 0 <= age_ns < self._ttl_ns

    def _load(
        self, caller: Caller, question: _Question, keys: Sequence[bytes]
    ) -> dict[bytes, StoredRow]:
        each_s = self.keeper.gate.seconds_per_token
        patience_s = max(_LEAST_S, each_s * len(keys)) if each_s else LONG_S
        until_s = time.monotonic() + patience_s
        request = object()
        known = caller.lookup(keys, request)
        try:
            while None in known and time.monotonic() < until_s:  # a remote tier has not answered
                time.sleep(_POLL_S)
                known = caller.lookup(keys, request)
            there = [key for key, is_there in zip(keys, known, strict=True) if is_there]
            size = self._sizes.get(self._size_key(question), 0)
            if not there or not self.keeper.worth(there, size or PART_BYTES, len(there)):
                return {}
            rows, longer = self._fetch(caller, dict.fromkeys(there, size), until_s)
            rows |= self._fetch(caller, longer, until_s)[0] if longer else {}
        finally:
            caller.release(request)
        if rows:
            self._learn_size(question, next(iter(rows.values())))
        return rows

    def _fetch(
        self, caller: Caller, sizes: Mapping[bytes, int], until_s: float
    ) -> tuple[dict[bytes, StoredRow], dict[bytes, int]]:
        """Load rows.

        Args:
            caller: The keeper's caller.
            sizes: Bytes of each body; 0 if unknown: its first part has the size.
            until_s: Time by which they must come.

        Returns:
            The rows that came, and the true sizes of rows with another size.
        """
        targets = [memoryview(bytearray(size or PART_BYTES)) for size in sizes.values()]
        loads = [
            Load(key, target, self._layout, 0, 0, 0 if size else 1)
            for (key, size), target in zip(sizes.items(), targets, strict=True)
        ]
        left_s = max(until_s - time.monotonic(), 0.0)
        job = caller.submit_load(loads, deadline_s=left_s)
        answers = answers_of(caller, job, len(loads), until_s)
        if len(answers) < len(loads) or any(a.reason == "deadline" for a in answers):
            caller.cancel(job)
            self._rest_until_s = time.monotonic() + _REST_S
            with self._lock:
                self._counts["late"] += len(loads) - sum(a.outcome is Outcome.HIT for a in answers)
        rows: dict[bytes, StoredRow] = {}
        longer: dict[bytes, int] = {}
        for answer in answers:
            if answer.reason == "target":  # longer than other rows of such inputs
                longer[answer.key] = 0
            if answer.outcome is not Outcome.HIT:
                continue
            try:
                row, end = decode_row(targets[answer.item][: answer.n_bytes])
            except ValueError:  # verified, but no row: a frame of other software
                caller.delete([answer.key])
                continue
            if row.parts or not row.infos:
                rows[answer.key] = row
            else:
                stripes, step = stripes_of(end)
                longer[answer.key] = stripes * step
        return rows, longer

    def _size_key(self, question: _Question) -> bytes:
        return msgspec.msgpack.encode(question.infos)

    def _learn_size(self, question: _Question, row: StoredRow) -> None:
        stripes, step = stripes_of(sum(map(len, row.encode()[:2])) + row.n_bytes)
        if len(self._sizes) >= _MOST_SIZES:
            self._sizes.clear()
        self._sizes[self._size_key(question)] = stripes * step

    # ---- results

    def _joined(
        self,
        question: _Question,
        keys: Sequence[bytes],
        rows: Mapping[bytes, StoredRow],
        made: Mapping[bytes, StoredRow] | None = None,
        computed: Sequence[Any] = (),
    ) -> Any:
        """Return the result for all rows, in order, from found and computed ones."""
        order = {key: i for i, key in enumerate((*(made or {}), *rows))}
        index = [order[key] for key in keys]
        like = next(iter((made or rows).values()))
        kept = [row.parts for row in rows.values()]
        leaves = []
        for number, info in enumerate(like.infos):
            parts = [computed[number]] if made else []
            if kept:
                device = self._device(question, info)
                parts.append(info.join([part[number] for part in kept], device))
            leaf = joined(parts)
            if self._batch is False:
                leaf = leaf.reshape(info.shape)
            elif index != [*range(len(order))]:
                leaf = rows_of(leaf, index)
            leaves.append(leaf)
        return put(like.form, iter(leaves))

    def _device(self, question: _Question, info: LeafInfo) -> torch.device:
        """Return the device of a result: that of the inputs, or else of the weights."""
        if info.device in question.devices:
            return question.devices[info.device]
        tensors = () if self._root is None else self._root.parameters()
        where = next((t.device for t in tensors if t.device.type == info.device), None)
        return where or torch.device(info.device)


class _Declined(Exception):
    """Reason why a call is only computed."""


def memo(
    function: Callable[..., Any] | None = None,
    *,
    places: str | Sequence[str] | Keeper = "host:256MiB",
    key: str | Callable[[], str] | None = None,
    ttl: float | None = None,
    tenant: str = "",
    batch: bool | Collection[str] = True,
    clock: Clock | None = None,
    **options: Any,
) -> Any:
    """Cache the results of a deterministic encoder, by content, row by row.

    Rows of a batch that were computed before are loaded, and the others computed in one smaller
    batch, each once. Calls that train, require gradients or draw random numbers are only computed.
    A row that was computed in a batch of another size may differ in its last bits, as it does
    without `memo`; the first result is the one that is stored.

    Args:
        function: A module, or a function with a result that depends only on its arguments and the
            objects it refers to. Without one, a decorator is returned.
        places: Places of rows, fastest first, as in "host:1GiB" or "disk:./memo:20GiB"; or a
            `flowkv.connect.Keeper` that several share.
        key: A name instead of the computation's own, which covers weights, code and settings; or
            a function that returns the name at each call. A name must change with the function.
        ttl: Seconds after which a row is computed again; default never.
        tenant: Owner of the rows. `memo(...).tenant("name")` is the same for another tenant.
        batch: Whether dimension 0 of all tensors, and lists of texts, are the rows; the names of
            the arguments with rows; or False: a call is one row.
        clock: Time for `ttl`, in nanoseconds that other processes share; default the time of day.
        **options: For the places: policy, policy_options, quotas, durability, integrity, secret,
            lossless, exclusive, bus.

    Returns:
        A `Memo`, which is called like the function. `close()` it, or use it in a `with` block.

    Raises:
        ConfigError: A place or an option is invalid.
        UnsupportedModelError: The function cannot be named, and `key` is missing.

    Example:
        >>> encoder = flowkv.memo(encoder, places=["host:256MiB", "disk:./memo:2GiB"])
        >>> features = encoder(pixel_values)
    """
    how: dict[str, Any] = dict(key=key, ttl=ttl, tenant=tenant, batch=batch, clock=clock)
    if function is None:
        return functools.partial(memo, places=places, **how, **options)
    if isinstance(places, Keeper):
        if options:
            raise ConfigError(f"a keeper takes no {sorted(options)}", "Pass them to open_keeper")
        return Memo(function, places, **how)
    secret = Config(secret=options.get("secret", "")).secret_bytes
    listed = (places,) if isinstance(places, str) else tuple(places)
    keeper = open_keeper(*listed, **options)
    try:
        held = Memo(function, keeper, **how, secret=secret)
    except BaseException:
        keeper.close()
        raise
    held._mine = True
    return held


def _close_all() -> None:
    for one in [*_OPEN]:
        one.close()


atexit.register(_close_all)


def _nanoseconds(ttl: float | None) -> int | None:
    if ttl is not None and not ttl > 0:
        raise ConfigError(f"ttl={ttl!r}", "Give a number of seconds, or None for no end")
    return None if ttl is None else round(ttl * 1e9)


def _root(function: Any) -> torch.nn.Module | None:
    """Return the module that a function is, or is a method of; None without one."""
    while isinstance(function, functools.partial):
        function = function.func
    for one in (function, getattr(function, "__self__", None)):
        if isinstance(one, torch.nn.Module):
            return one
    return None


def _parameters(function: Any) -> tuple[list[str], list[str]]:
    """Return the names of the parameters that may be passed by position, and of all."""
    try:
        known = parameters_of(function)
    except (TypeError, ValueError):  # a function in C
        return [], []
    return [name for name, p in known.items() if p.kind <= p.POSITIONAL_OR_KEYWORD], [*known]


def _state(*inputs: Any) -> Any:
    """Return what differs once inputs were written to, as far as can be told."""
    leaves = list[Any]()
    try:
        forms = [take(part, leaves) for part in inputs]
    except UnnamedError:  # a list got an item of any kind
        return None
    counts = [version_of(x) if isinstance(x, torch.Tensor) else -1 for x in leaves]
    other = [bytes_by_row(x, rows=False)[0] for x, n in zip(leaves, counts, strict=True) if n < 0]
    return forms, counts, [*map(xxhash.xxh3_128_digest, other)]


def _classes(form: Any) -> bool:
    """Return whether a form has classes, which may have code that no name covers."""
    if form[0] in ("leaf", "plain", "dtype", "device"):
        return False
    named = form[0] not in ("tuple", "list", "dict")
    return named or any(map(_classes, form[-1]))


def _may_be_rows(form: Any, rows: int) -> bool:
    """Return whether a form has a list of so many items, or a tuple of so many plain values."""
    if form[0] not in ("tuple", "list", "dict"):
        return False
    plain = all(part[0] == "plain" for part in form[-1])
    listed = form[0] == "list" or (form[0] == "tuple" and plain)
    each = [_may_be_rows(part, rows) for part in form[-1]]
    return (listed and len(each) == rows) or any(each)


def _bare(form: Any) -> bool:
    """Return whether a form has nothing but leaves, and None in their place; lists may be rows."""
    if form[0] == "plain":
        return form[1] is None
    return form[0] == "leaf" or (form[0] != "list" and all(map(_bare, form[-1])))


def _alike(rows: Sequence[StoredRow]) -> bool:
    """Return whether rows fit into one batch: others depend on the rest of their batch."""
    return all((row.form, row.infos) == (rows[0].form, rows[0].infos) for row in rows)
