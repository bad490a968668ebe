"""Machine code is kept where nobody else can write, and nothing fails where it cannot be kept."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import FunctionType
from typing import Any
from urllib.parse import quote

import numba
import pytest
from numba import types

from tests.inside import cache_home, directory, kept, kept_callback

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    return tmp_path / "cache" / "flowkv"


def double(n: int) -> int:
    return 2 * n


def again() -> Any:
    """The function as another process would have it, not compiled yet."""
    return kept()(FunctionType(double.__code__, globals(), "double"))


def hits(dispatcher: Any) -> int:
    assert dispatcher(21) == 42
    return sum(dispatcher.stats.cache_hits.values())


def test_what_was_compiled_is_found_in_a_directory_of_the_users_own(home: Path) -> None:
    assert hits(again()) == 0
    assert hits(again()) == 1
    found = directory(Path(__file__).parent)
    assert found is not None and found.parent == home / "compiled"
    assert {path.suffix for path in found.iterdir()} == {".nbi", ".nbc"}
    for path in (home, home / "compiled", found):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_another_stamp_is_compiled_anew(home: Path) -> None:
    for stamp in ("one", "other"):
        assert hits(kept(stamp)(FunctionType(double.__code__, globals(), "double"))) == 0


def test_callbacks_are_kept(home: Path) -> None:
    made = [kept_callback(types.int64(types.int64))(double) for _ in range(2)]
    assert [callback.ctypes(21) for callback in made] == [42, 42]
    assert [callback.cache_hits for callback in made] == [0, 1]


@pytest.mark.parametrize("place", ["", "compiled"])
def test_what_others_can_write_is_not_read(home: Path, place: str) -> None:
    assert hits(again()) == 0
    (home / place).chmod(0o770)
    assert directory(Path(__file__).parent) is None
    assert hits(again()) == hits(again()) == 0


def test_what_cannot_be_written_is_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hits(again()) == 0

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(numba.core.caching.IndexDataCacheFile, "_open_for_write", refuse)
    assert hits(again()) == 1
    other = again()
    assert other(2.5) == 5.0  # of a type that was not kept, and now cannot be
    assert hits(other) == 1
    (index,) = home.rglob("*.nbi")
    os.truncate(index, 40)
    assert hits(again()) == 0


@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
@pytest.mark.parametrize("n_bytes", [0, 40])
def test_what_is_damaged_is_compiled_anew(home: Path, ending: str, n_bytes: int) -> None:
    assert hits(again()) == 0
    (damaged,) = home.rglob(f"*{ending}")
    os.truncate(damaged, n_bytes)
    assert hits(again()) == 0
    assert hits(again()) == 1


def test_no_changed_byte_of_machine_code_is_run(home: Path) -> None:
    assert hits(again()) == 0
    (path,) = home.rglob("*.nbc")
    body = bytearray(path.read_bytes())
    at = body.rindex(b"double")  # in the names of the machine code, where no error shows
    body[at] ^= 1
    path.write_bytes(body)
    assert hits(again()) == 0
    assert hits(again()) == 1


def test_code_that_another_process_wrote_under_the_same_name_is_not_run(home: Path) -> None:
    """Two processes that find no index number their code alike."""
    of_floats, both = again(), again()
    assert (both(21), both(2.5)) == (42, 5.0)
    one, other = sorted(home.rglob("*.nbc"))
    one.rename(other)
    assert of_floats(2.5) == 5.0 and of_floats.signatures[0][0] == types.float64


def test_code_of_earlier_sources_is_not_run_after_a_full_disk(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = double.__code__
    treble = (lambda n: 3 * n).__code__  # small numbers are no constants from Python 3.14 on
    earlier = code.replace(co_code=treble.co_code, co_consts=treble.co_consts)
    assert kept("earlier")(FunctionType(earlier, globals(), "double"))(21) == 63

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(numba.core.caching.IndexDataCacheFile, "_save_data", full)
        assert kept("now")(FunctionType(code, globals(), "double"))(21) == 42
    assert kept("now")(FunctionType(code, globals(), "double"))(21) == 42


def test_versions_of_numba_keep_machine_code_apart(home: Path) -> None:
    """Two environments over one checkout: numba empties an index that another version wrote."""
    assert hits(again()) == 0
    found = directory(Path(__file__).parent)
    assert found is not None and f"numba-{numba.__version__}" in found.name
    other = [sys.executable, "-c", OTHER, str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": ""}
    named = subprocess.run(other, env=environment, capture_output=True, text=True, check=True)
    assert "numba-0.1" in named.stdout and named.stdout.strip() != found.name
    assert hits(again()) == 1


OTHER = """
import sys
from pathlib import Path
import numba
numba.__version__ = "0.1"
from flowkv.compiled.machine_code import directory
print(directory(Path(sys.argv[1])).name)
"""


def test_machine_code_of_other_sources_and_versions_goes_after_a_month(home: Path) -> None:
    there = directory(ROOT)
    assert there is not None
    end = there.name.removeprefix(quote(str(ROOT), safe=""))
    paths = (f"{home}/gone{end}", f"{home}/young{end}", f"{ROOT}@numba-0.1", f"{ROOT}")
    gone, young, *others = (there.parent / quote(path, safe="@") for path in paths)
    for path in (gone, young, *others):
        path.mkdir()
    for path in (gone, *others, there):
        os.utime(path, times=(0, time.time() - 31 * 86400))
    assert directory(Path(__file__).parent) is not None
    assert young.exists() and there.exists()
    assert not any(path.exists() for path in (gone, *others))


def test_a_long_path_has_a_short_name(home: Path) -> None:
    found = directory(Path("/" + 50 * "long/"))
    assert found is not None and len(found.name.partition("@")[0]) == 64


ALL = """
import flowkv.cache.block_table, flowkv.kernels.cpu.operations, flowkv.policy.order.leaf
import flowkv.tiers.digest, flowkv.tiers.lossless, flowkv.tiers.shared, flowkv.tiers.io.uring
import numpy as np
from flowkv.tiers.lossless import _split
from flowkv.core.config import cache_home
halves = np.zeros((2, 1), np.uint8)
_split(np.arange(2, dtype=np.uint8), *halves)
print(halves.ravel().tolist(), cache_home())
"""


@pytest.mark.parametrize("where", ["/dev/null", "/proc"])
def test_where_no_directory_can_be_made_is_none(
    where: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", where)
    assert directory(ROOT) is None
    assert hits(again()) == hits(again()) == 0


def test_nothing_needs_a_directory() -> None:
    where = "/dev/null"
    environment = {**os.environ, "HOME": where, "XDG_CACHE_HOME": "", "PYTHONPATH": str(ROOT)}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", ALL], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"[1, 0] {where}/.cache/flowkv\n", done.stderr
    assert not done.stderr


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", missing)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_home() is None
    assert directory(ROOT) is None
