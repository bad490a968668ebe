"""Bytes that host memory copies, counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.inside import host, tiers_digest


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
