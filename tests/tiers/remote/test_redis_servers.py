"""The tier in Redis, on servers that ask for a password, speak TLS, or form a cluster."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowkv.tiers import Outcome
from tests.clock import wait_for
from tests.inside import RedisTier, StoreError

from ..frames import get, hits, key_of, outcomes, stored
from .faulty_redis import FaultyRedis
from .servers_redis import RedisServer, redis_server
from .test_redis import opened


def test_passwords(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "secret") as server:
        with opened(f"redis://:secret@127.0.0.1:{server.port}/0") as tier:
            stored(tier, range(2))
            assert hits(tier, range(2)) == 2 and "secret" not in tier.name
        for uri in (server.uri, f"redis://:wrong@127.0.0.1:{server.port}/0"):
            with pytest.raises(StoreError, match="refuses access"):
                RedisTier(uri)


def redis_key(name: object) -> bytes:
    return b"flowkv:" + key_of(name).hex().encode()


@contextlib.contextmanager
def two_nodes(directory: Path, *, border: int = 8192) -> Iterator[tuple[RedisServer, RedisServer]]:
    """A cluster of two servers that share the slots, the first one the halves below a border."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
    with (
        redis_server(directory / "a", *options) as first,
        redis_server(directory / "b", *options) as second,
    ):
        for half in (range(8192), range(8192, 16384)):
            server = first if half.start < border else second
            server.ask(b"CLUSTER ADDSLOTS " + " ".join(map(str, half)).encode())
        first.ask(f"CLUSTER MEET 127.0.0.1 {second.port}".encode())
        ready = b"cluster_state:ok\r\ncluster_slots_assigned:16384"
        wait_for(lambda: all(ready in s.ask(b"CLUSTER INFO") for s in (first, second)))
        yield first, second


def test_a_cluster(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (first, second), opened(first.uri + "?cluster=true") as tier:
        stored(tier, range(40))
        sizes = [int(server.ask(b"DBSIZE")[1:-2]) for server in (first, second)]
        assert sum(sizes) == 40 and min(sizes) > 5, "the frames are on both"
        assert hits(tier, range(41)) == 40
        assert tier.delete([key_of(name) for name in range(20)]) == 20
        wait_for(lambda: sum(int(s.ask(b"DBSIZE")[1:-2]) for s in (first, second)) == 20)
        assert tier.erase([key_of(name) for name in range(30)]) == 10
        slots = {
            n: int(first.ask(b"CLUSTER KEYSLOT " + redis_key(n))[1:-2]) for n in range(100, 150)
        }
        name, other = [n for n, slot in slots.items() if slot < 8192][:2]
        new = second.ask(b"CLUSTER MYID").split(b"\r\n")[1]

        def move(slot: int) -> None:  # one that holds nothing, behind the tier's back
            for server in (second, first):
                server.ask(b"CLUSTER SETSLOT %d NODE %b" % (slot, new))

        move(slots[name])
        stored(tier, [name])
        assert second.ask(b"EXISTS " + redis_key(name)) == b":1\r\n" and hits(tier, [name]) == 1
        move(slots[other])
        assert outcomes(get(tier, [other])) == [("miss", "")]
        assert tier.erase([key_of(name)]) == 1
        with opened(second.uri + "?cluster=true") as other:
            assert len(list(other.scan())) == 10
            assert other.contains([key_of(n) for n in range(40)]) == [n >= 30 for n in range(40)]
            second.stop()  # half of the frames are out of reach, the others are served
            reached = {}

            def some() -> bool:
                for answer in get(tier, range(30, 40)):
                    reached[answer.key] = answer.outcome
                return Outcome.FAILED in reached.values()

            wait_for(some)


def test_a_server_that_joins_a_cluster_is_listed(tmp_path: Path) -> None:
    """An erasure was proven by the lists of those servers that were there at the opening."""
    nodes = two_nodes(tmp_path, border=16384)
    with nodes as (first, second), opened(first.uri + "?cluster=true") as tier:
        slot = int(first.ask(b"CLUSTER KEYSLOT " + redis_key("late"))[1:-2])
        new = second.ask(b"CLUSTER MYID").split(b"\r\n")[1]
        for server in (second, first):
            server.ask(b"CLUSTER SETSLOT %d NODE %b" % (slot, new))
        with opened(first.uri + "?cluster=true") as other:
            stored(other, ["late"])
        assert second.ask(b"DBSIZE") == b":1\r\n"
        tier.survey()
        assert [entry.key for entry in tier.scan()] == [key_of("late")]


def certificate(directory: Path) -> Path:
    """A key and a certificate of 127.0.0.1, in one file."""
    crypto = pytest.importorskip("cryptography.x509", reason="needs cryptography for a certificate")
    import datetime
    import ipaddress

    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = crypto.Name([crypto.NameAttribute(crypto.NameOID.COMMON_NAME, "test")])
    address = crypto.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.datetime.now(datetime.UTC)
    made = (
        crypto.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(crypto.SubjectAlternativeName([address]), critical=False)
        .add_extension(crypto.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = directory / "server.pem"
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(
        key.private_bytes(*form, serialization.NoEncryption())
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


def test_tls(tmp_path: Path) -> None:
    pem = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    with FaultyRedis(context=context) as server:
        uri = f"rediss://127.0.0.1:{server.port}/0?ssl_ca_certs={pem}"
        with opened(uri) as tier:
            stored(tier, range(5), 3 << 20)
            assert hits(tier, range(6), 3 << 20) == 5
            assert server.connections >= 1
        with pytest.warns(UserWarning, match="does not answer"):
            stranger = RedisTier(f"rediss://127.0.0.1:{server.port}/0")  # an unknown authority
        assert outcomes(get(stranger, [1]))[0][0] == "failed"
        stranger.close()
