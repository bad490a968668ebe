"""What numba lacks: a safe cache of machine code, parts of compiled code, and intrinsics.

The cache is for later processes, in a directory that only its user can write to.

By itself numba caches beside the sources, which may belong to other users or be on a read-only file
system, and then refuses to compile at all; it also unpickles any file found there. Here the
directory may be absent, read-only, full or damaged: code that cannot be read is compiled, and code
that cannot be written is compiled again by the next process. `NUMBA_CACHE_DIR` names another
directory.

A part is a function that only compiled ones call: it is compiled in those, not on its own.
By itself numba optimises every function together with all that it calls, and makes machine code for
each, although most of it never runs: a function called five deep is worked on six times. A part
stays in the form of the frontend until a function that Python calls is optimised, with all of its
parts at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numba
import numpy as np
import xxhash
from llvmlite import ir
from numba import types
from numba.core import caching, ccallback, cgutils, sigutils
from numba.extending import intrinsic

from flowkv.core.config import cache_home

TRIED = (0, 68)
"""The latest release of numba with internals that are known to fit this module."""


def _pipeline() -> type[Any]:
    """Return numba's own pipeline except its last step, which leaves code for others to link."""
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler
    from numba.core.compiler_machinery import register_pass
    from numba.core.typed_passes import NativeLowering

    class PartLibrary(JITCodeLibrary):
        """Code of a part and of the functions it calls, for libraries that link it."""

        def _optimize_final_module(self) -> None:
            """Do nothing: the library that links this one does it."""

        def _finalize_final_module(self) -> None:
            self._finalize_dynamic_globals()
            self._finalized = True

    @register_pass(mutates_CFG=True, analysis_only=False)
    class PartLowering(NativeLowering):
        """Lowering of a function for compiled callers only."""

        _name = "part_lowering"

        def run_pass(self, state: Any) -> bool:
            """Lower the function and fill `state.cr`."""
            state.library = PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
            state.flags.no_compile = True
            super().run_pass(state)
            made = state["cr"]
            key = [made].pop  # of a type that numba takes, equal to no other, and never called
            state.targetctx.insert_user_function(key, made.fndesc, [state.library])
            state["cr"] = made._replace(cfunc=key)
            return True

    class PartCompiler(Compiler):
        """Compiler of parts."""

        def define_pipelines(self) -> list[Any]:
            """Return the passes, in order."""
            made: list[Any] = super().define_pipelines()
            for manager in made:
                passes = manager.passes
                manager.passes = [
                    (PartLowering, why) if step is NativeLowering else (step, why)
                    for step, why in passes
                ]
                manager.finalize()
            return made

    return PartCompiler


PART: dict[str, Any] = {
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
"""Options of `numba.njit` for parts."""
# later releases are unknown: there parts compile like other functions
if numba.version_info.short <= TRIED:
    PART["pipeline_class"] = _pipeline()


_NAMES = ("UserProvidedCacheLocator", "UserWideCacheLocator")
_Provided, _UserWide = (
    getattr(caching, name, None) or getattr(caching, f"_{name}")  # private names in older releases
    for name in _NAMES
)
_NOWHERE = "/dev/null/flowkv"
_LONGEST = 200
"""Most letters of a name: the path of the sources, or its digest if it is longer."""
_STALE_S = 30 * 86400.0
_MADE_BY = f"@numba-{numba.__version__}-numpy-{np.__version__}"
"""End of a name: numba drops what another version of its own made; numpy's version changes code."""


def _own(path: Path) -> bool:
    """Make a directory if it is missing; return whether only this user owns and writes it."""
    with suppress(OSError):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        found = path.stat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    )


def directory(sources: Path) -> Path | None:
    """Return the cache directory for one directory of sources; None if there can be none.

    Each version of numba and numpy has one of its own. Making a new one removes those of deleted
    sources and of other versions, a month after their last change.
    """
    home = cache_home()
    if home is None or not _own(home) or not _own(home / "compiled"):
        return None
    name = quote(str(sources), safe="")
    if len(name) > _LONGEST:
        name = hashlib.sha256(name.encode()).hexdigest()
    found = home / "compiled" / (name + _MADE_BY)
    if found.is_dir():
        return found
    with suppress(OSError):
        for other in (home / "compiled").glob("%2F*"):
            path = other.name.removesuffix(_MADE_BY)
            gone = path == other.name or not Path(unquote(path)).exists()
            if gone and other.stat().st_mtime < time.time() - _STALE_S:
                shutil.rmtree(other, ignore_errors=True)
    return found if _own(found) else None


def is_kept(sources: Path) -> bool:
    """Return whether later processes need not compile the functions in one directory of sources."""
    return bool(numba.config.CACHE_DIR) or directory(sources) is not None


def lock_file() -> Path | None:
    """Return the lock file of processes that compile for later ones; None without a cache."""
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR) / "flowkv.lock"
    found = directory(Path(__file__).parent)
    return found and found.parent / "lock"


class NotKept(Exception):
    """Raised where a call needs machine code that is not in the cache."""


class _Mode(threading.local):
    only_kept = False


_MODE = _Mode()


@contextmanager
def only_kept() -> Iterator[None]:
    """Load machine code in calls of this thread, and raise `NotKept` where it is missing."""
    _MODE.only_kept = True
    try:
        yield
    finally:
        _MODE.only_kept = False


class _Place(_UserWide):  # type: ignore[misc, valid-type]
    """Locator of the cache directory for numba."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self._cache_path = str(directory(Path(file).resolve().parent) or _NOWHERE)

    def ensure_cache_path(self) -> None:
        """Do nothing: an unusable path shows at the first write."""


class _Form(caching.CompileResultCacheImpl):
    _locator_classes = (_Provided, _Place)


class _File(caching.IndexDataCacheFile):
    """Files of one function: each code with its source, its signature, and a digest at the end.

    Numba writes an index before the code it names, and does not lock: behind a full disk, a kill,
    or another process, an index may name code of another source or signature.
    """

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (self._source_stamp, key, data))

    def load(self, key: Any) -> Any:
        found = super().load(key)
        return found[2] if found and found[:2] == (self._source_stamp, key) else None

    def _dump(self, what: Any) -> bytes:
        body: bytes = super()._dump(what)
        return body + xxhash.xxh3_128_digest(body)  # unpickling ignores what follows

    def _load_data(self, name: str) -> Any:
        body = Path(self._data_path(name)).read_bytes()
        if xxhash.xxh3_128_digest(body[:-16]) != body[-16:]:
            raise OSError(f"{name} is damaged")
        return super()._load_data(name)


class _Cache(caching.FunctionCache):
    """Cache of machine code of one function. Errors of files never reach its callers."""

    _impl_class = _Form

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the cached code for a signature, or None.

        Raises:
            NotKept: No code is cached, within `only_kept`.
        """
        found = None
        try:
            found = super().load_overload(signature, context)
        except Exception:  # unpickling of damaged files raises anything
            with suppress(OSError):
                self.flush()
        if found is None and _MODE.only_kept:
            raise NotKept(self._name)
        return found

    def save_overload(self, signature: Any, made: Any) -> None:
        """Write compiled code to the cache, if that is possible."""
        with suppress(Exception):  # a damaged index that could not be emptied, too
            super().save_overload(signature, made)


def kept(stamp: object = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like `numba.njit` that caches machine code for later processes.

    Args:
        stamp: Version of all that the function's own file does not show; code cached under another
            one is not used.
        **options: Options of `numba.njit`.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        if hasattr(dispatcher, "_cache"):  # else numba is switched off: it is the function itself
            dispatcher._cache = _stamped(function, stamp)
        return dispatcher

    return decorate


def _stamped(function: Callable[..., Any], stamp: object) -> _Cache:
    """Return the cache of one function, for code under one stamp."""
    cache = _Cache(function)
    source = cache._cache_file._source_stamp, stamp
    cache._cache_file = _File(cache._cache_path, cache._impl.filename_base, source)
    return cache


def kept_callback(
    signature: Any, stamp: object = None, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like `numba.cfunc` that caches machine code for later processes.

    Args:
        signature: Signature of the C function.
        stamp: As of `kept`.
        **options: Options of `numba.cfunc`.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        parts = sigutils.normalize_signature(signature)
        callback: Any = ccallback.CFunc(function, parts, locals={}, options=options)
        callback._cache = _stamped(function, stamp)
        callback.compile()
        return callback

    return decorate


LINE_BYTES = 64
"""Bytes of a cache line, or near enough."""

_I32, _BYTES = ir.IntType(32), ir.IntType(8).as_pointer()
_LINE = ir.VectorType(ir.IntType(64), LINE_BYTES // 8).as_pointer()


def instruction(result=types.none):
    """Make an intrinsic of a function that emits it, of a builder and the values of its arguments.

    `result` is the type of what it returns.
    """

    def of(emit):
        @intrinsic
        @wraps(emit)
        def typed(context, *kinds):
            def codegen(context, builder, signature, args):
                value = emit(builder, *args)
                return context.get_dummy_value() if value is None else value

            return result(*kinds), codegen

        return typed

    return of


@intrinsic
def pointer(context, address, like):
    """Return the address as a pointer to elements of the type of `like`."""
    signature = types.CPointer(like)(address, like)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, codegen


@intrinsic
def data(context, array):
    """Return a pointer to the elements of a contiguous array, which must outlive its use."""

    def codegen(context, builder, signature, args):
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def ahead(context, p, i):
    """Return the pointer p + i, in elements."""
    return p(p, i), lambda context, builder, signature, args: builder.gep(args[0], [args[1]])


@instruction()
def prefetch(builder, p, i):
    """Ask for the cache line of p[i]; never faults."""
    line = builder.bitcast(builder.gep(p, [i]), _BYTES)
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
    fn = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(fn, [line, _I32(0), _I32(2), _I32(1)])  # read, into L2, data


@instruction()
def stream(builder, target, source):
    """Copy a line past the caches; the target is aligned to lines, and needs a `fence`."""
    to, of = (builder.inttoptr(x, _LINE) for x in (target, source))
    stored = builder.store(builder.load(of, align=1), to, align=LINE_BYTES)
    stored.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))


@instruction()
def fence(builder):
    """Order all earlier writes before all later ones, for other threads."""
    builder.fence("seq_cst")
