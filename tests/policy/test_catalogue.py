"""Names, options, and what is said when they are wrong."""

from __future__ import annotations

import math

import msgspec
import pytest

from flowkv.policy import CATALOGUE, LRU, Lease, LfuTtl, LfuTtlConfig, Policy, make_policy
from tests.inside import ConfigError


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_row(name):
    row = CATALOGUE[name]
    policy = make_policy(name)
    assert isinstance(policy, Policy)
    assert type(policy) is row.make
    assert policy.config == msgspec.convert(dict(row.defaults), row.config)
    assert policy.name in CATALOGUE
    assert make_policy(policy) is policy


def test_auto_is_the_hedge():
    assert make_policy("auto").name == "auto"
    assert make_policy("auto").chosen == "hazard"


def test_options():
    config = make_policy("lfu-ttl", tau_s=30, lease_s=600, leases={"mine": {"lease_s": 5}}).config
    assert config.tau_s == 30.0
    assert config.classes()[""] == Lease(600.0)
    assert config.classes()["mine"] == Lease(5.0, math.inf)
    assert config.classes()["turn_end"] == Lease(1800.0)
    assert LfuTtlConfig() == LfuTtl().config


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lfu", {}, "no policy 'lfu'. Did you mean"),
        ("quantum", {}, "Use one of " + ", ".join(CATALOGUE)),
        ("lru", {"tau_s": 1}, "'tau_s'. Its fields are lease_s"),
        ("lfu-ttl", {"tau": 1}, "'tau'. Its fields are lease_s, max_age_s, leases, tau_s"),
        ("lfu-ttl", {"tau_s": -1}, "in 'tau_s'"),
        ("lfu-ttl", {"tau_s": math.nan}, "in 'tau_s'"),
        ("lfu-ttl", {"tau_s": math.inf}, "in 'tau_s'"),
        ("lfu-ttl", {"tau_s": "fast"}, "in 'tau_s'"),
        ("lfu-ttl", {"lease_s": 0}, "in 'lease_s'"),
        ("lfu-ttl", {"leases": {"x": {"lease": 1}}}, "unknown field 'lease'"),
        ("lfu-ttl", {"leases": {"x": 7}}, "in 'leases"),
        (LRU, {}, "is no policy. Pass a name"),
        (42, {}, "42 is no policy"),
        (LRU(), {"tau_s": 1}, "Configure the object"),
    ],
)
def test_errors_name_the_field_and_the_remedy(name, options, message):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        make_policy(name, **options)


def test_testing_is_lazy():
    import flowkv.testing

    assert "check_policy" in dir(flowkv.testing)
    with pytest.raises(AttributeError, match="no attribute 'check_nothing'"):
        flowkv.testing.check_nothing  # noqa: B018
