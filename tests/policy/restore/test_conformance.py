"""Every restore policy of the catalogue keeps every rule, whatever it meets."""

from __future__ import annotations

import pytest

from bench.restore.baselines import RESTORE_POLICIES
from flowkv.testing import check_restore_policy


@pytest.mark.parametrize("name", RESTORE_POLICIES)
def test_keeps_the_rules(name: str) -> None:
    check_restore_policy(RESTORE_POLICIES[name], max_examples=60)


@pytest.mark.deep
@pytest.mark.parametrize("name", RESTORE_POLICIES)
def test_keeps_the_rules_for_long(name: str) -> None:
    check_restore_policy(RESTORE_POLICIES[name], max_examples=5000)
