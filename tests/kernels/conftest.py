"""One torch thread for the room: kernels that spread their work are tested with their own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread(one_thread: None) -> None:
    """For every test here."""
