"""Bytes that host memory copies, counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.inside import GRANULE_BYTES, host, mover, tiers_digest, tiers_frame


class Counting:
    """Counts bytes of bodies that are copied by the compiled calls, or one at a time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.n_bytes = 0
        seal, check, copyto = tiers_digest.seal_frames, tiers_digest.check_known, np.copyto

        def sealed(rows: Any) -> None:
            self.n_bytes += sum(
                int(r["step"] * r["stripes"]) for r in rows if r["body"] != r["data"]
            )
            seal(rows)

        def checked(rows: Any) -> Any:
            self.n_bytes += sum(step * n for _, _, at, _, to, step, _, _, n, _ in rows if at != to)
            return check(rows)

        def copied(target: Any, source: Any) -> None:
            self.n_bytes += target.nbytes
            copyto(target, source)

        patch.setattr(tiers_digest, "seal_frames", sealed)
        patch.setattr(tiers_digest, "check_known", checked)
        patch.setattr(host.np, "copyto", copied)


class Touching:
    """Counts bytes of bodies that the processor reads, to digest or to copy them.

    Everything of a disk goes through the compiled calls.

    Attributes:
        n_bytes: Their number; headers, of few pages, do not count.
        n_copied: Number of those that it copies, too.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.n_bytes = self.n_copied = 0
        seal, all_ = tiers_digest.seal_frames, tiers_digest.check_all
        copyto, plain, given = np.copyto, tiers_frame.digests, mover.copied

        def sealed(rows: Any) -> None:
            self.n_bytes += sum(int(r["step"] * r["stripes"]) for r in rows)
            self.n_copied += sum(
                int(r["step"] * r["stripes"]) for r in rows if r["data"] != r["body"]
            )
            seal(rows)

        def checked(rows: Any, *given: Any) -> Any:
            read = [r for r in rows if r["data"]]
            self.n_bytes += sum(int(r["step"] * r["stripes"]) for r in read)
            moved = [r for r in read if r["target"] not in (0, r["data"])]
            self.n_copied += sum(int(r["step"] * r["stripes"]) for r in moved)
            return all_(rows, *given)

        def copied(target: Any, source: Any) -> None:
            self.n_bytes += target.nbytes
            self.n_copied += target.nbytes
            copyto(target, source)

        def from_memory(target: Any, *rest: Any) -> bool:
            self.n_bytes += len(target)
            self.n_copied += len(target)
            return given(target, *rest)

        def digested(data: Any, step: int) -> bytes:
            size = memoryview(data).nbytes
            self.n_bytes += size if size > step or not size % GRANULE_BYTES else 0
            return plain(data, step)

        patch.setattr(tiers_digest, "seal_frames", sealed)
        patch.setattr(tiers_digest, "check_all", checked)
        patch.setattr(host.np, "copyto", copied)
        patch.setattr(mover, "copied", from_memory)
        patch.setattr(tiers_frame, "digests", digested)
