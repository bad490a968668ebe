"""Configuration: one meaning per field, and errors that name the field."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from flowkv import Config, FlowKVError
from tests.inside import ENVIRONMENT, ConfigError, TierConfig, load_config


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)


def write(folder: Path, text: str) -> Path:
    path = folder / "flowkv.toml"
    path.write_text(text)
    return path


def stack(config: Config, *, on_cpu: bool = False) -> list[str]:
    return [str(place) for place in config.places(on_cpu=on_cpu)]


def test_default_stack() -> None:
    assert load_config() == Config()
    assert stack(Config()) == ["gpu:25%", "host:25%"]
    assert stack(Config(), on_cpu=True) == ["gpu:2GiB"]


def test_fields_make_a_stack() -> None:
    config = Config(gpu="8GiB", host=1 << 30, disk="./kv:200GiB")
    assert stack(config) == ["gpu:8GiB", "host:1073741824", "disk:./kv:200GiB"]
    assert stack(config) == stack(config, on_cpu=True)
    assert stack(Config(host=0, disk="kv")) == ["gpu:25%", "disk:kv:10%"]
    assert Config(disk="disk:./kv:1GiB").places()[-1] == TierConfig("disk", "./kv", "1GiB")


def test_tiers_are_the_stack() -> None:
    tiers = ["gpu:8GiB", "host:32GiB", "disk:/nvme/kv:200GiB", "/hdd/kv:4TiB", "s3://bucket/kv"]
    config = load_config(tiers=tiers)
    assert stack(config) == [*tiers[:3], "disk:/hdd/kv:4TiB", tiers[4]]
    assert stack(Config(tiers=("disk:./kv:1GiB",))) == ["gpu:25%", "disk:./kv:1GiB"]
    assert stack(Config(tiers=())) == ["gpu:25%"]
    assert stack(Config(tiers=("host", "disk:./kv"))) == ["gpu:25%", "host:25%", "disk:./kv:10%"]


def test_host_tiers_of_several_names() -> None:
    tiers = ["gpu:8GiB", "host:1GiB", "host:ours:2GiB", "host:theirs:25%"]
    assert stack(load_config(tiers=tiers)) == tiers


def test_frames_are_encrypted_with_a_long_secret_only() -> None:
    assert (Config().integrity, Config().lossless) == ("xxh3", "auto")
    config = load_config(integrity="aead", secret="ab" * 16, lossless="off")
    assert config.secret_bytes == b"\xab" * 16 and "abab" not in repr(config)


def test_a_list_of_tiers_can_be_hashed() -> None:
    assert hash(Config(tiers=["gpu"])) == hash(Config(tiers=("gpu",)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pag_size": 64}, r"`pag_size` is not a field\. Did you mean `page_size`\."),
        ({"zzz": 64}, r"`zzz` is not a field\. Fields are gpu, host"),
        ({"page_size": "64"}, r"`page_size`: expected `int \| None`, got `str`"),
        ({"quotas": "a"}, r"`quotas`: expected `dict`, got `str`"),
        ({"page_size": 64.0}, r"`page_size`: .*`int"),
        ({"page_size": 12}, r"`page_size`: .*multiple of 8"),
        ({"page_size": 512}, r"`page_size`"),
        ({"exclusive": 1}, r"`exclusive`: expected `bool`"),
        ({"gpu": 1.5}, r"`gpu`: expected"),
        ({"gpu": "8G"}, r"`gpu`: .*8GiB"),
        ({"gpu": 0}, r"`gpu`: .*no bytes"),
        ({"host": "much"}, r"`host`: 'much' is not a size"),
        ({"disk": "200GiB"}, r"`disk`: .*names no directory"),
        ({"disk": "s3://b/kv"}, r"`disk`: .*tiers="),
        ({"disk": "200GiB:./kv"}, r"`disk`: .*size in front\. Write disk:./kv:200GiB"),
        ({"disk": "dsk:./kv"}, r"`disk`: .*has no kind dsk\. Write disk:./kv"),
        ({"disk": "disk:disk:./kv"}, r"`disk`: .*names its kind twice\. Write disk:./kv"),
        ({"tiers": "gpu"}, r"`tiers`: 'gpu' is one text.*Write tiers=\[\"gpu\"\]"),
        ({"tiers": ["gpu", 5]}, r"`tiers\[1\]`: expected `str`, got `int`"),
        ({"tiers": ["gpu", "hots:3GiB"]}, r"`tiers\[1\]`: .*Did you mean host:3GiB"),
        ({"tiers": ["./kv", "host"]}, r"`tiers\[1\]`: .*lies below the slower 'disk:./kv'"),
        ({"tiers": ["s3://b", "./kv"]}, r"`tiers\[1\]`: .*in this order"),
        ({"tiers": ["./kv", "kv/../kv/:5GiB"]}, r"`tiers\[1\]`: .*named twice"),
        ({"tiers": ["gpu", "gpu:1GiB"]}, r"`tiers\[1\]`: .*named twice"),
        ({"tiers": ["gpu"], "host": 5}, r"`tiers`: given beside `host`"),
        ({"codec": "kv9"}, r"`codec`: .*raw, kv8"),
        ({"policy": ""}, r"`policy`"),
        ({"durability": "fsync"}, r"`durability`: 'fsync' is unknown\. Use one of none, sync"),
        ({"prefetch": "on"}, r"`prefetch`: .*auto, markov, off"),
        ({"graphs": "of"}, r"`graphs`: 'of' is neither auto, off nor a size\. Write a size"),
        ({"max_rows": 0}, r"`max_rows`"),
        ({"load_deadline_s": 0}, r"`load_deadline_s`"),
        ({"load_deadline_s": float("inf")}, r"`load_deadline_s`"),
        ({"load_deadline_s": float("nan")}, r"`load_deadline_s`"),
        ({"audit": -0.01}, r"`audit`"),
        ({"audit": 1.01}, r"`audit`"),
        ({"audit": float("nan")}, r"`audit`"),
        ({"secret": "xyz"}, r"`secret`: "),
        ({"secret": "abc"}, r"`secret`: "),
        ({"secret": "ab" * 65}, r"`secret`: "),
        ({"integrity": "crc"}, r"`integrity`: 'crc' is unknown\. Use one of xxh3, aead"),
        ({"lossless": "zip"}, r"`lossless`: "),
        ({"integrity": "aead"}, r"`secret`: 0 bytes are too few"),
        ({"integrity": "aead", "secret": "ab" * 15}, r"`secret`: 15 bytes are too few"),
        ({"tiers": ["host:a:1GiB", "host:a:2GiB"]}, r"`tiers\[1\]`: .*named twice"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(**fields)


def test_toml_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'gpu = "8GiB"\ndisk = "./kv:1GiB"\npage_size = 128\nexclusive = true\n')
    expected = Config(gpu="8GiB", disk="./kv:1GiB", page_size=128, exclusive=True)
    assert load_config(path) == load_config(str(path)) == expected
    assert load_config(path, page_size=16, gpu=None) == Config(
        gpu="8GiB", disk="./kv:1GiB", page_size=16, exclusive=True
    )


def test_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(write(tmp_path, 'tenant = "alice"\n')))
    assert load_config() == Config(tenant="alice")
    assert load_config(tenant="bob").tenant == "bob"
    other = tmp_path / "other.toml"
    other.write_text('tenant = "carol"\n')
    assert load_config(other).tenant == "carol"  # what is said in code outweighs the environment
    monkeypatch.setenv(ENVIRONMENT, "")
    assert load_config() == Config()


def test_keywords_displace_the_files_stack(tmp_path: Path) -> None:
    listed = write(tmp_path, 'tiers = ["gpu:1GiB", "./kv:1GiB"]\ncodec = "kv8"\n')
    assert load_config(listed, host="2GiB") == Config(host="2GiB", codec="kv8")
    fields = write(tmp_path, 'gpu = "1GiB"\nhost = "1GiB"\n')
    assert load_config(fields, tiers=["gpu:2GiB"]) == Config(tiers=("gpu:2GiB",))
    assert load_config(fields, gpu="2GiB") == Config(gpu="2GiB", host="1GiB")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('pag_size = 1\ntenant = "a"\n', r"flowkv\.toml: `pag_size` is not a field"),
        ('tiers = ["gpu", 1]\n', r"flowkv\.toml: `tiers\[1\]`: expected `str`"),
        ('tiers = ["gpu", "x"]\n', r"flowkv\.toml: `tiers\[1\]`: place 'x'"),
        ("[cache]\ngpu = 1\n", r"flowkv\.toml: `cache` is not a field"),
        ("gpu = \n", r"flowkv\.toml is not TOML .*line 1"),
    ],
)
def test_faults_of_a_file_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .*unset FLOWKV_CONFIG"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    path = tmp_path / "latin.toml"
    path.write_bytes(b'tenant = "\xe9"\n')
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(path)


def test_codecs_have_defaults_of_their_own() -> None:
    assert (Config().tokens_per_page, Config().raw_tokens) == (64, 64)
    auto = Config(codec="auto")
    assert (auto.tokens_per_page, auto.raw_tokens) == (128, 128)
    given = load_config(codec="auto", page_size=16, recent_tokens=0)
    assert (given.tokens_per_page, given.raw_tokens) == (16, 0)


@pytest.mark.parametrize(
    "fields",
    [
        *({"codec": "kv2"}, {"recent_tokens": -1}, {"warm_tokens": -1}, {"non_finite": "zero"}),
        {"page_size": 0},
    ],
)
def test_bad_codec_fields_are_named(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"`{next(iter(fields))}`"):
        load_config(**fields)


def test_the_secret_is_never_shown() -> None:
    config = load_config(secret="00fF", page_size=128)
    assert config.secret_bytes == b"\x00\xff"
    assert repr(config) == str(config) == "Config(page_size=128, secret='...')"
    with pytest.raises(ConfigError) as caught:
        load_config(secret="topsecret!")
    assert "topsecret" not in str(caught.value)


SECRET = "hunter2"
SECRETIVE = [
    "redis://alice:hunter2@cache:6379/0",
    "redis://:hunter2@cache/0:4GiB",
    "rediss://alice:pa/ss@hunter2@cache:6379",
    "valkey://alice:hunter2?x#y@cache:6379",
    "redis://cache:6379/0?password=hunter2&prefix=mine",
    "redis://cache:6379/0?a=b@c&hunter2",
    "s3://hunter2@bucket/kv:4TiB",
    "s3://bucket/kv?secret_access_key=hunter2",
    "az://account/kv?sv=1&sig=hunter2%3D#hunter2",
    "mooncake://alice:hunter2@master:50051",
    "REDIS://alice:hunter2@cache",
    "redis://alice:hun ter2 hunter2@cache",
]


@pytest.mark.parametrize("uri", SECRETIVE)
def test_no_secret_of_a_uri_is_shown(uri: str) -> None:
    config = load_config(tiers=["gpu:1GiB", uri])
    assert uri in (config.tiers or ()), "what is shown is not what is used"
    for shown in (repr(config), str(config), f"{config}", repr(config.places()), repr([config])):
        assert SECRET not in shown and "hun" not in shown


@pytest.mark.parametrize("uri", SECRETIVE)
def test_no_error_shows_a_secret_of_a_uri(uri: str) -> None:
    plain = uri.removesuffix(":4GiB").removesuffix(":4TiB")
    for wrong in (
        *({"tiers": [uri, "disk:./kv"]}, {"tiers": [uri, uri]}, {"tiers": [f"{plain}:5%"]}),
        *({"tiers": [f"{plain}:0GiB"]}, {"tiers": [f"disk://{uri.partition('://')[2]}"]}),
        *({"tiers": [f"file://{uri.partition('://')[2]}"]}, {"tiers": [uri.replace("://", ":")]}),
        *({"tiers": [f"{uri}\0"], "disk": "./kv"}, {"disk": uri}),
        *({"disk": uri.replace("://", ":")}, {"gpu": uri}, {"host": uri}),
    ):
        try:
            said = repr(load_config(**wrong))  # type: ignore[arg-type]
        except FlowKVError as error:
            said = "".join(traceback.format_exception(error))
            said += f"{error!r} {error.problem} {error.remedy}"
        lines = [line for line in said.splitlines() if SECRET in line]
        assert not lines, lines


def test_what_is_no_secret_is_shown() -> None:
    places = "gpu:8GiB", "disk:/data/me@home/kv:20GiB", "s3://bucket/a@b:4TiB", "redis://h:6379/1"
    assert repr(load_config(tiers=places)) == f"Config(tiers={places!r})"
