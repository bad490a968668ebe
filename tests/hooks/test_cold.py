"""Pages of cold tiers at one to two bits a value, from `attach` to a later process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import flowkv
from tests.hooks import models
from tests.hooks.compare import attached, generate, reused
from tests.inside import (
    ConfigError,
    PageCoder,
    PrefixMatcher,
    Quarantined,
    StateError,
    StoreError,
    TokenError,
    cache_restore,
    calibrate,
    door_of,
    forget_name,
    kvt_basis,
    kvt_tier,
    load,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model() -> Any:
    return models.causal("llama")


def text(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 250, (count,), generator=generator).tolist()


@contextmanager
def cold(model: Any, path: Path, **options: Any) -> Iterator[flowkv.KV]:
    given = {"gpu": "64MiB", "page_size": 16, "disk": f"{path}:256MiB", "cold": "kvt"} | options
    with pytest.warns(flowkv.ExperimentalWarning, match="cold"):
        kv = flowkv.attach(model, **{n: value for n, value in given.items() if value is not None})
    with kv:
        yield kv


PROMPT = torch.tensor([text(200, 5)])


def answer(model: Any) -> torch.Tensor:
    return generate(model, 4, input_ids=PROMPT).sequences  # type: ignore[no-any-return]


def learn(kv: flowkv.KV) -> dict[str, float]:
    found = kv.calibrate(text(9 * 256), kl=0.01)
    assert found["kept"] and 0 < found["kl"] <= 0.01 and found["bits"] < 8
    assert found["tokens"] > 0 and 0 < found["same_token"] <= 1
    return found


def store(kv: flowkv.KV, model: Any) -> dict[str, float]:
    """Calibrate, and store coded pages of the prompt."""
    found = learn(kv)
    answer(model)
    assert kv.flush(60)
    return found


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, model = tmp_path_factory.mktemp("stored") / "kv", models.causal("llama")
    with cold(model, place) as kv:
        store(kv, model)
        assert kv.stats()["cold"]["pages"]
    return place


@pytest.fixture
def place(stored: Path, tmp_path: Path) -> Path:
    """A directory of an earlier process, in which coded pages of the prompt lie."""
    copied = shutil.copytree(stored, tmp_path / "kv")
    copied.chmod(0o700)
    return copied


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "falcon"])
def test_a_later_process_reads_coded_pages(tmp_path: Path, kind: str) -> None:
    model = models.causal(kind)
    with torch.no_grad():
        wanted = model(PROMPT).logits[0, -1]
    with cold(model, tmp_path) as kv:
        measured = store(kv, model)
        said = kv.stats()["cold"]
        assert said["pages"] >= 12 and said["coded_bytes"] < said["raw_bytes"] / 2
        assert said["kl"] == measured["kl"]
        with torch.no_grad():  # what lies on the device is exact, as it was
            cache = kv.cache(PROMPT[:, :-1])
            exact = model(PROMPT[:, cache.get_seq_length() :], past_key_values=cache).logits[0, -1]
        torch.testing.assert_close(exact, wanted, atol=1e-4, rtol=1e-4)
        del cache
    with cold(model, tmp_path) as kv:
        with torch.no_grad():
            cache = kv.cache(PROMPT)
            assert cache.get_seq_length() >= 192
            got = model(PROMPT[:, cache.get_seq_length() :], past_key_values=cache).logits[0, -1]
        near = torch.nn.functional.kl_div(
            got.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="sum"
        )
        assert 0 < float(near) < 0.2
        assert kv.stats()["cold"]["decoded_bytes"] > 0
        del cache


@pytest.mark.parametrize("codec", ["raw", "kv8"])
def test_readers_of_exact_pages_compute(place: Path, codec: str, model: Any) -> None:
    wanted = answer(model)
    with attached(model, disk=f"{place}:256MiB", codec=codec) as kv:
        got = answer(model)
        assert reused(kv) == 0
        assert codec != "raw" or torch.equal(got, wanted)
        assert kv.flush(60)
    with attached(model, disk=f"{place}:256MiB", codec=codec) as kv:  # now theirs lie there
        answer(model)
        assert reused(kv) > 0


def test_a_changed_model_has_no_bases(tmp_path: Path, model: Any) -> None:
    with cold(model, tmp_path) as kv:
        learn(kv)
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        answer(model)
        assert kv.stats()["cold"]["groups"] == 0
        assert kv.flush(60)
    with cold(model, tmp_path) as kv:
        wanted = answer(model)
        assert reused(kv) > 0
    assert torch.equal(answer(model), wanted)


def test_bounds_that_cannot_be_kept(tmp_path: Path, model: Any) -> None:
    wanted = answer(model)
    with cold(model, tmp_path) as kv:
        with pytest.warns(UserWarning, match="stay as they are.*kvt:kl="):
            found = kv.calibrate(text(9 * 256), kl=1e-13)
        assert not found["kept"]
        answer(model)
        assert kv.flush(60) and not kv.stats()["cold"].get("pages")
    with cold(model, tmp_path) as kv:
        assert torch.equal(answer(model), wanted) and reused(kv) > 0


def test_what_a_press_leaves_is_not_coded(tmp_path: Path, model: Any) -> None:
    """Its keys are of other positions than those that a basis turns them back by."""
    with cold(model, tmp_path, sparsify="kvzip:0.5") as kv:
        store(kv, model)
        assert kv.stats()["cold"]["pages"] == 12
    with cold(model, tmp_path, sparsify="kvzip:0.5") as kv:
        answer(model)
        pages = [block for block in kv.planner.store.index if block.kind == "page"]
        assert [block.placed for block in pages].count(False) == 6
        assert kv.export(tmp_path / "file")
    with cold(model, tmp_path / "other", sparsify="kvzip:0.5") as kv:
        learn(kv)
        assert kv.load(tmp_path / "file") and kv.flush(60)
        assert kv.stats()["cold"]["pages"] <= 12, "frames say which pages are not in place"


def test_what_cannot_be_calibrated(tmp_path: Path, model: Any) -> None:
    with cold(model, tmp_path) as kv, pytest.raises(ConfigError, match=r"too few.*1024 or more"):
        kv.calibrate(text(1000))
    with attached(model) as kv, pytest.raises(StateError, match='cold="kvt"'):
        kv.calibrate(text(3000))
    for wrong in ("kv", "kvt:", "kvt:kl", "kvt:kl=x", "kvt:kl=-1", "kvt:bits=2", ":auto"):
        with pytest.raises(ConfigError, match=r"`cold`.*Write kvt"):
            flowkv.Config(cold=wrong)


def ask(model: Any, ids: list[int]) -> None:
    generate(model, 1, input_ids=torch.tensor([ids]))


def test_prompts_are_learned_from(tmp_path: Path) -> None:
    """What a prompt shares with one before counts once; those of tenants do not count."""
    model, system = models.causal("llama"), text(200, 99)
    with cold(model, tmp_path) as kv:
        kv.open(text(3000, 98), tenant="other").close()
        with pytest.raises(ConfigError, match="0 tokens are too few"):
            kv.calibrate()
        for n in range(8):
            ask(model, [*system, *text(300, n)])
            ask(model, [*system, *text(300, n), *text(20, n)])
        seen = kv.bases.kept_tokens()
        assert seen.tolist()[:500] == [*system, *text(300, 0)]
        assert len(seen) == 200 + 8 * 320
        assert kv.calibrate(kl=0.01)["kept"] and not len(kv.bases.kept_tokens())
        assert kv.flush(60)
        answer(model)
        assert kv.flush(60) and kv.stats()["cold"]["pages"]


def test_a_cache_of_a_tenant_learns_from_no_prompt(tmp_path: Path, model: Any) -> None:
    """What is learned is stored for all tenants."""
    with cold(model, tmp_path, tenant="acme") as kv:
        ask(model, text(40))
        assert not len(kv.bases.kept_tokens())
        kv.open(text(40, 1), tenant="").close()
        assert kv.bases.kept_tokens().tolist() == text(40, 1)


@pytest.mark.parametrize("options", [{}, {"disk": None, "host": "16MiB"}])
@pytest.mark.parametrize("count", [7, 60])
def test_erased_prompts_are_not_learned_from(
    tmp_path: Path, options: dict[str, Any], count: int, model: Any
) -> None:
    with cold(model, tmp_path, **options) as kv:
        ask(model, text(count))
        assert len(kv.bases.kept_tokens()) == count
        kv.forget(text(count))
        assert not len(kv.bases.kept_tokens())


def test_a_model_answers_where_calibrating_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("of this test")

    monkeypatch.setattr(kvt_tier, "ENOUGH_SEEN", 400)
    model = models.causal("llama")
    wanted = answer(model)
    with cold(model, tmp_path, cold="kvt:auto") as kv:
        monkeypatch.setattr(kv, "_calibrates", fails)
        ask(model, text(450))
        with pytest.warns(UserWarning, match="cold pages stay raw: of this test"):
            assert torch.equal(answer(model), wanted)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_model_calibrates_itself_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    monkeypatch.setattr(kvt_tier, "ENOUGH_SEEN", 2000)
    model, plain = models.causal("llama"), models.causal("llama")
    with cold(model, tmp_path, cold="kvt:kl=0.01:auto") as kv:
        for n in range(5):
            ask(model, text(480, n))
        assert not kv.stats()["cold"]["groups"]
        if forgets:
            kv.forget(text(480, 0))
            assert not len(kv.bases.kept_tokens())
        assert torch.equal(answer(model), generate(plain, 4, input_ids=PROMPT).sequences)
        assert kv.stats()["cold"]["groups"] == (not forgets)


def test_what_cannot_calibrate_itself_stays_raw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvt_tier, "ENOUGH_SEEN", 400)
    model = models.causal("llama")
    with cold(model, tmp_path, cold="kvt:auto") as kv:
        ask(model, text(450))
        with pytest.warns(UserWarning, match="cold pages stay raw.*too few"):
            ask(model, text(30, 2))
        ask(model, text(30, 3))
        assert not kv.stats()["cold"]["groups"]


def test_erased_prompts_are_gone(tmp_path: Path, model: Any) -> None:
    with cold(model, tmp_path) as kv:
        store(kv, model)
        assert kv.forget(PROMPT[0].tolist()) > 0
        (tier,) = kv.planner.store.stack.tiers
        assert not any(entry.info.kind == "page" for entry in tier.scan())
        answer(model)
        assert reused(kv) == 0


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_coded_pages_are_audited(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.causal(kind)
    with cold(model, tmp_path) as kv:
        store(kv, model)
    with cold(model, tmp_path, audit=1.0) as kv:
        answer(model)
        assert reused(kv) > 0
        said = kv.stats()["audit"]
        assert said["audited"] > 0 and said["mismatches"] == 0 and said["worst"] < 0.9
    decode = PageCoder.decode_batch

    def decoded(one: Any, pages: Any, first: int, layers: int) -> list[bool]:
        """Give the pages with their tokens in the wrong places."""
        found = decode(one, pages, first, layers)
        for view in (view for _, target in pages for view in one.views(target, layers)):
            view.copy_(view.roll(1, 2))
        return found

    monkeypatch.setattr(PageCoder, "decode_batch", decoded)
    with cold(model, tmp_path, audit=1.0) as kv, pytest.warns(UserWarning, match="audit"):
        answer(model)
        assert kv.stats()["audit"]["mismatches"] > 0


def test_a_wrong_page_is_not_remembered_once_it_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit forgets it; what lies in memory of its coded form is not the page made after it."""
    model, encode, wrong = models.causal("llama"), PageCoder.encode, True

    def encoded(one: Any, body: memoryview, page_no: int) -> Any:
        own = bytearray(body)
        for view in one.views(memoryview(own)) if wrong else ():
            view.copy_(view.roll(1, 2))
        return encode(one, memoryview(own), page_no)

    monkeypatch.setattr(PageCoder, "encode", encoded)
    with cold(model, tmp_path) as kv:
        store(kv, model)
    wrong = False
    with cold(model, tmp_path, audit=1.0, gpu="1MiB") as kv:
        bases: Any = kv.bases
        wrongs = list[tuple[bytes, Any]]()

        def note(event: Quarantined) -> None:
            wrongs.append((event.key, bases.recent.get(event.key)))

        with kv.bus.subscribe(note, Quarantined):
            with pytest.warns(UserWarning, match="restored"):
                answer(model)
            assert len(wrongs) == 1 and wrongs[0][1] is not None
            answer(model)
            for seed in range(20):  # the page leaves the device
                ask(model, text(240, seed + 50))
                assert kv.flush(60)
            answer(model)
        assert len(wrongs) == len(dict(wrongs)) == kv.stats()["audit"]["mismatches"], (
            "pages before the first one may be found, too, but none twice"
        )
        for key, wrong_page in wrongs:
            assert bases.recent.get(key) is not wrong_page


def test_coded_pages_of_another_geometry_are_passed_over(place: Path, model: Any) -> None:
    with cold(model, place, page_size=32) as kv:
        answer(model)
        assert reused(kv) == 0


def test_a_bound_that_earlier_calibrations_exceed(place: Path, model: Any) -> None:
    with (
        pytest.warns(UserWarning, match="more than cold='kvt:kl=1e-06' allows"),
        cold(model, place, cold="kvt:kl=1e-06") as kv,
    ):
        assert 0 < kv.stats()["cold"]["kl"] <= 0.01


def test_sliding_layers_are_learned_at_all_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = models.causal("gemma3"), set()
    sides, tail = calibrate.Calibrator._sides, calibrate.Calibrator._tail

    def _sides(one: Any, cache: Any, group: int) -> Any:
        found = sides(one, cache, group)
        seen.add((group, found[0].shape[2] - one.prompt))
        return found

    def _tail(one: Any, window: torch.Tensor, cache: Any) -> torch.Tensor:
        found = tail(one, window, cache)
        if len(seen) == 2 and found.shape not in seen:  # before anything is coded
            seen.add(found.shape)
            wanted = model(window[None]).logits[0, one.prompt :].log_softmax(-1)
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        return found

    monkeypatch.setattr(calibrate.Calibrator, "_sides", _sides)
    monkeypatch.setattr(calibrate.Calibrator, "_tail", _tail)
    with cold(model, tmp_path) as kv:
        learn(kv)
    assert {(0, 0), (1, 0)} < seen and len(seen) == 3


def test_full_tiers_make_room_for_bases(tmp_path: Path, model: Any) -> None:
    with cold(model, tmp_path, disk=f"{tmp_path}:2MiB", policy="lru") as kv:
        kv.planner.measured = lambda *_: None  # loading is always worth it
        for seed in range(12):
            generate(model, 2, input_ids=torch.tensor([text(240, seed + 50)]))
            assert kv.flush(60)
        (tier,) = kv.planner.store.stack.tiers
        assert tier.used_bytes() > 0.9 * tier.capacity_bytes
        store(kv, model)
        assert kv.stats()["cold"]["pages"]
    with cold(model, tmp_path, disk=f"{tmp_path}:2MiB", policy="lru") as kv:
        kv.planner.measured = lambda *_: None
        assert kv.stats()["cold"]["groups"] == 1
        answer(model)
        assert reused(kv) > 0


def test_caches_without_cold_evict_no_basis(tmp_path: Path, model: Any) -> None:
    with cold(model, tmp_path, disk=f"{tmp_path}:2MiB", policy="lru") as kv:
        store(kv, model)
        assert kv.stats()["cold"]["pages"]
    with attached(model, disk=f"{tmp_path}:2MiB", policy="lru") as kv:
        for seed in range(24):
            generate(model, 2, input_ids=torch.tensor([text(240, seed + 50)]))
            kv.flush(60)
        (tier,) = kv.planner.store.stack.tiers
        assert tier.used_bytes() > 0.8 * tier.capacity_bytes
    with cold(model, tmp_path, disk=f"{tmp_path}:2MiB", policy="lru") as kv:
        assert kv.stats()["cold"]["groups"] == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_forgotten_model_leaves_no_basis(tmp_path: Path, whole: bool, model: Any) -> None:
    with cold(model, tmp_path) as kv:
        store(kv, model)
        if whole:
            forget_name(kv, kv.namespace)
        else:
            assert kv.forget() > 0
        (tier,) = kv.planner.store.stack.tiers
        assert {entry.info.kind for entry in tier.scan()} == (set() if whole else {"memo"})
        assert kv.stats()["cold"]["groups"] == (not whole)


@pytest.mark.parametrize("again", [False, True])
def test_a_model_that_is_forgotten_while_it_is_learned_from_gets_no_basis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    model, search = models.causal("llama"), calibrate.search
    with cold(model, tmp_path) as kv:
        if again:
            learn(kv)

        def searched(*given: Any) -> Any:
            found = search(*given)
            forget_name(kv, kv.namespace)
            return found

        monkeypatch.setattr(calibrate, "search", searched)
        with pytest.raises(StateError, match=r"forgotten.*Calibrate again"):
            kv.calibrate(text(9 * 256, 1), kl=0.01)
        answer(model)
        assert kv.flush(60)
        (tier,) = kv.planner.store.stack.tiers
        assert "memo" not in {entry.info.kind for entry in tier.scan()}
        assert kv.stats()["cold"]["groups"] == 0 and not kv.stats()["cold"].get("pages")
        monkeypatch.setattr(calibrate, "search", search)
        learn(kv)


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_basis_is_of_the_model_that_it_was_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: bool
) -> None:
    model, search = models.causal("llama"), calibrate.search
    keys = model.model.layers[0].self_attn.k_proj.weight

    def change() -> None:
        with torch.no_grad():
            keys.mul_(2)

    def searched(*given: Any) -> Any:
        found = search(*given)
        change()
        return found

    with cold(model, tmp_path) as kv:
        before = kv.namespace
        if meanwhile:
            monkeypatch.setattr(calibrate, "search", searched)
            with pytest.raises(StateError, match=r"changed.*Calibrate again"):
                learn(kv)
            monkeypatch.setattr(calibrate, "search", search)
        else:
            change()
        learn(kv)
        answer(model)
        assert kv.namespace != before and kv.stats()["cold"]["groups"] == 1
    with torch.no_grad():
        keys.div_(2)
    with cold(model, tmp_path) as kv:
        assert kv.namespace == before and kv.stats()["cold"]["groups"] == 0


@pytest.mark.parametrize("coded", [True, False])
def test_a_model_that_another_cache_forgets_leaves_no_basis(place: Path, coded: bool) -> None:
    """The cache that may write to the directory erases its bases, whether it uses them or not."""
    model, other = models.causal("llama"), models.causal("llama")
    with cold(model, place) if coded else attached(model, disk=f"{place}:256MiB") as kv:
        with pytest.warns(UserWarning, match="owns"), cold(other, place) as reader:
            with pytest.raises(StoreError, match="only be read here"):
                forget_name(reader, reader.namespace)
            assert reader.stats()["cold"]["groups"] == 0
        answer(model)
        assert kv.flush(60)
        (tier,) = kv.planner.store.stack.tiers
        assert "memo" not in {entry.info.kind for entry in tier.scan()}
        assert not coded or kv.stats()["cold"]["groups"] == 0
    with cold(model, place) as kv:
        assert kv.stats()["cold"]["groups"] == 0


def test_quotas_count_what_coded_pages_take(tmp_path: Path, model: Any) -> None:
    for later in (False, True):
        given = {"quotas": {"alice": "64MiB"}, "tenant": "alice", "page_size": 64}
        with cold(model, tmp_path, **given) as kv:
            if not later:
                store(kv, model)
            (tier,), said = kv.planner.store.stack.tiers, kv.stats()
            held = sum(entry.n_bytes for entry in tier.scan() if entry.info.kind == "page")
            used = said["policies"][tier.name]["quotas"]["alice"]["used_bytes"]
            assert 0 < held * 0.9 < used < held * 1.5
            assert later or used < said["cold"]["raw_bytes"] / 2


def test_texts_take_the_tokenizer_of_the_model(tmp_path: Path, model: Any) -> None:
    with cold(model, tmp_path) as kv:
        for given in ("abc", ["abc", "def"]):
            with pytest.raises(ConfigError, match=r"tokenizer.*Pass token ids"):
                kv.calibrate(given)
        load.ENCODERS[model] = lambda text: list(text.encode())
        halves = ["".join(map(chr, text(900, seed))) for seed in (1, 2)]
        found = kv.calibrate(halves, kl=0.1)
        ids = [one for half in halves for one in half.encode()]
        assert found == kv.calibrate(ids, kl=0.1)
        for wrong in ([["abc"]], ["abc", 7], []):
            with pytest.raises((ConfigError, TokenError)):
                kv.calibrate(wrong)


def test_bounds_without_sense_are_refused(tmp_path: Path) -> None:
    with cold(models.causal("llama"), tmp_path) as kv:
        for bound in (0, -1, float("nan"), 10):
            with pytest.raises(ConfigError, match="above 0"):
                kv.calibrate(text(3000), kl=bound)


@pytest.mark.parametrize("given", [[7] * 3000, text(100) * 30], ids=["token", "passage"])
def test_texts_that_repeat_themselves_are_refused(tmp_path: Path, given: list[int]) -> None:
    model = models.causal("llama")
    with cold(model, tmp_path) as kv:
        with pytest.raises(ConfigError, match=r"repeats itself: \d+ of 2922 .*each passage once"):
            kv.calibrate(given, kl=0.01)
        assert kv.stats()["cold"]["groups"] == 0
        answer(model)
        assert kv.flush(60) and not kv.stats()["cold"].get("pages")


def test_calibration_within_inference_mode(tmp_path: Path, model: Any) -> None:
    with cold(model, tmp_path) as kv:
        with torch.inference_mode():
            store(kv, model)
        assert kv.stats()["cold"]["pages"]


def test_caches_of_coded_pages_are_not_calibrated(tmp_path: Path) -> None:
    with (
        cold(models.causal("llama"), tmp_path, codec="kv8") as kv,
        pytest.raises(ConfigError, match="coded already"),
    ):
        kv.calibrate(text(9 * 256))


@pytest.mark.parametrize("kind", ["llama", "falcon_h1"])
def test_errors_name_one_cause(tmp_path: Path, kind: str) -> None:
    given, mine, other = {"codec": "kv8"}, "codec='kv8'", "layers other"
    if kind != "llama":
        given, mine, other = {}, other, mine
    with cold(models.causal(kind), tmp_path, **given) as kv, pytest.raises(ConfigError) as error:
        kv.calibrate(text(9 * 256))
    assert mine in str(error.value) and other not in str(error.value)


def test_windows_keep_to_the_positions_of_a_model(tmp_path: Path, model: Any) -> None:
    model.config.max_position_embeddings = 128
    for size, window in ((16, 128), (64, 85), (112, 128)):
        with cold(model, tmp_path / str(size), page_size=size):
            one = calibrate.Calibrator(door_of(model))
            assert one._cut(9 * 4096) == 16 and one.window == window
    with (
        cold(model, tmp_path / "128", page_size=128) as kv,
        pytest.raises(ConfigError, match=r"128 positions.*smaller page_size"),
    ):
        kv.calibrate(text(9 * 256))


def test_pages_are_not_kept_where_no_tier_codes_them(tmp_path: Path, model: Any) -> None:
    for disk, said in (
        (None, "no disk or remote tier"),
        (f"{tmp_path}:256KiB", "cannot be stored"),
    ):
        with cold(model, tmp_path, disk=disk) as kv, pytest.warns(UserWarning, match=said):
            assert not kv.calibrate(text(9 * 256), kl=0.01)["kept"]


def test_policies_learn_beside_coded_pages(tmp_path: Path) -> None:
    with cold(models.causal("llama"), tmp_path) as kv:
        assert kv._learned() == tmp_path


@pytest.mark.parametrize(("kind", "depth"), [("llama", 3), ("gemma3", 0)])
def test_requests_of_layers_end_where_chunks_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, depth: int
) -> None:
    """Each chunk of a page is decoded once: else neighbouring requests both decode it."""
    model = models.causal(kind)
    layers = model.config.num_hidden_layers
    monkeypatch.setattr(kvt_basis, "MOST_DIMS", 3 * 2 * 16)  # chunks of three layers
    monkeypatch.setattr(cache_restore, "_WORTH_BYTES", 1)
    with cold(model, tmp_path) as kv:
        store(kv, model)
    counted, found = PrefixMatcher.least_layers, list[int]()

    def noted(*given: Any) -> int:
        found.append(counted(*given))
        return found[-1]

    monkeypatch.setattr(PrefixMatcher, "least_layers", noted)
    with cold(model, tmp_path):
        answer(model)
    assert found == [depth or layers]
