"""Rows, promises and advice of `python -m bench serve`, and the command itself."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from bench.__main__ import main
from bench.policy.finding import Finding
from bench.serve import command
from bench.serve.baselines import BATCHED, SEQUENTIAL, STATIC
from bench.serve.ground import Ground, Setting
from bench.serve.promise import FIRST_COME, promises
from bench.serve.protocol import BASELINES, LOADS, PARTS, Plan, cells_of, describe, measure_loads
from bench.serve.recommend import Advice, recommend
from bench.serve.row import UNCACHED, Row, cells, situation
from bench.serve.served import Spread
from bench.serve.steps import Steps, findings
from bench.serve.turnstile import Turnstile
from tests.bench.serving import EchoGround
from tests.inside import ConfigError, Parser

# What the command's rows are promised to have, at least.
FIELDS = {
    *("concurrency", "scheduler", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "tpot_p50_s"),
    *("tpot_p99_s", "tokens_per_s", "kv_utilisation", "baseline"),
}


def row(**changed: object) -> Row:
    given = {
        **{"part": "concurrency", "model": "m", "device": "cpu", "concurrency": 16},
        "dtype": "float32",
        **{"scheduler": "fcfs", "baseline": "", "ttft_p50_s": 0.1, "ttft_p95_s": 0.2},
        **{"ttft_p99_s": 0.3, "tpot_p50_s": 0.01, "tpot_p99_s": 0.02, "tokens_per_s": 100.0},
        **{"kv_utilisation": 0.5, "arrivals": "closed", "lengths": "chat", "requests": 4},
        **{"repetitions": 2, "prompt_tokens": 9.0, "new_tokens": 8.0, "completion_mean_s": 1.0},
        **{"completion_max_s": 2.0, "tokens_per_s_min": 90.0, "tokens_per_s_max": 110.0},
    }
    return Row(**{**given, **changed})


def three(value: float) -> Spread:
    return Spread(value, value - 0.1, value + 0.1)


# ---- the protocol


def echo(**changed: object) -> Plan:
    given = {"parts": ("concurrency",), "concurrency": (2,), "requests": 6, "lengths": "8+3"}
    return Plan(
        **{**given, "repetitions": 3, "baselines": (SEQUENTIAL, STATIC, UNCACHED), **changed}
    )


def test_every_system_under_a_load() -> None:
    ground = EchoGround()
    told: list[tuple[int, int, str]] = []
    rows = measure_loads(ground, echo(), lambda *one: told.append(one))  # type: ignore[arg-type]
    assert [r.baseline for r in rows] == [SEQUENTIAL, STATIC, "", UNCACHED]
    assert {field for field in FIELDS if hasattr(rows[0], field)} == FIELDS
    own = rows[2]
    assert own.repetitions == 3 and own.requests == 6 and own.concurrency == 2
    assert own.scheduler == "fcfs" and rows[0].scheduler == ""
    assert own.kv_utilisation == 0.75 and rows[0].kv_utilisation is None
    assert own.ttft_p50_s == pytest.approx(0.5) and own.tpot_p99_s == pytest.approx(0.25)
    assert own.reused == pytest.approx(2 / 8) and own.preempted == 18
    assert set(own.throughput_over) == {SEQUENTIAL, STATIC, UNCACHED}
    assert own.ttft_over[UNCACHED] == pytest.approx((1, 1, 1)) and rows[0].ttft_over == {}
    assert [r.same_tokens for r in rows] == [1.0] * 4
    assert [done for done, _, _ in told] == list(range(12)) and {n for _, n, _ in told} == {12}
    names = [doing.partition(", ")[2] for _, _, doing in told]
    assert names[:4] == [SEQUENTIAL, STATIC, "engine", UNCACHED]
    assert names[4] == STATIC and names[8] == "engine", "each turn begins with another one"


def test_nobody_is_asked_again_what_another_cell_asked() -> None:
    ground = EchoGround()
    plan = echo(concurrency=(1, 2, 4), baselines=(), repetitions=2, lengths="64+3")
    measure_loads(ground, plan)  # type: ignore[arg-type]
    prompts = ground.engines[0].prompts  # 6, 6 and 8 requests, twice, and the warm-up
    measured = [tuple(prompt) for prompt in prompts if len(prompt) == 64]
    assert len(measured) == 40 and len(set(measured)) == 40


def test_an_engine_is_asked_by_strangers_where_nothing_is_to_be_found() -> None:
    ground = EchoGround()
    measure_loads(ground, echo(baselines=(UNCACHED,)))  # type: ignore[arg-type]
    assert len(ground.made) == 1 and ground.left == 1, "one engine, closed at the end"
    tenants = ground.engines[0].tenants
    known = [name for name in tenants if name is not None]
    assert known and len(known) == len(set(known)) and None in tenants


def test_wrong_tokens_are_told() -> None:
    rows = measure_loads(EchoGround(wrong=True), echo())  # type: ignore[arg-type]
    assert [r.same_tokens for r in rows] == [1.0, 1.0, 0.0, 0.0]
    finding = promises(rows)[-1]
    assert finding.measured == 0.0 and finding.met is False


def test_whose_tokens_are_promised() -> None:
    """The engine's: not those of a padded batch, and not where near ties fall either way."""
    others = [
        row(scheduler="", baseline=STATIC, same_tokens=0.5),
        row(dtype="bfloat16", same_tokens=0.9),
    ]
    assert promises(others)[-1].measured is None
    assert promises([*others, row(same_tokens=1.0)])[-1].met


def test_tokens_are_compared_with_those_of_sequential_generate_alone() -> None:
    rows = measure_loads(EchoGround(), echo(baselines=(STATIC,)))  # type: ignore[arg-type]
    assert [r.same_tokens for r in rows] == [None, None]


def test_parts_of_the_protocol() -> None:
    plan = Plan()
    assert set(LOADS) < set(PARTS) and plan.parts == tuple(PARTS)
    clients = cells_of(plan, "concurrency")
    assert [cell.load.concurrency for cell in clients] == [1, 2, 4, 8, 12, 16, 100]
    assert all(cell.load.requests >= cell.load.concurrency for cell in clients)
    assert {name for cell in clients for name, _ in cell.names()} == {*BASELINES, "engine"}
    *shares, many = cells_of(plan, "prefix")
    assert [cell.load.prefix_share for cell in shares] == [0, 0.25, 0.5, 0.75, 1.0]
    assert many.load.concurrency == 100 and many.load.prefix_tokens == 2048
    poisson, bursts = cells_of(plan, "arrivals", rate=10.0)
    assert (poisson.load.rate, bursts.load.arrivals) == (7.0, "bursts")
    assert [name for name, _ in poisson.names()] == ["fcfs", "shortest", "priority"]
    (pages,), (budget,) = cells_of(plan, "pages"), cells_of(plan, "budget")
    assert [name for name, _ in pages.names()] == ["page 16", "page 32", "page 64", "page 128"]
    assert [name for name, _ in budget.names()] == ["budget 256", "budget 512", "budget 1024"]
    (mixed,) = cells_of(plan, "scheduler", rate=10.0)
    assert mixed.load.concurrency > mixed.settings[0].max_rows, "somebody waits"
    assert mixed.load.rate == 20.0, "and others come later"
    assert poisson.load.requests >= 64
    assert describe(Setting(caching=False), ()) == UNCACHED


@pytest.mark.parametrize("wrong", [{"parts": ("speed",)}, {"baselines": ("vllm",)}], ids=str)
def test_plans_of_what_is_not_there(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="Use "):
        Plan(**wrong)


def test_page_sizes_have_engines_of_their_own() -> None:
    ground = EchoGround()
    rows = measure_loads(ground, echo(parts=("pages",), page_sizes=(16, 128)))  # type: ignore[arg-type]
    assert [setting.page_size for setting in ground.made] == [16, 128]
    assert [r.page_size for r in rows] == [16, 128]
    assert rows[1].ttft_over["page 16"].median == pytest.approx(8)


# ---- promises


def figure(found: list[Finding], what: str, on: str = "") -> Finding:
    (one,) = [f for f in found if what in f.what and on in f.trace]
    return one


def test_promises_are_those_of_the_rows() -> None:
    rows = [
        row(concurrency=4, throughput_over={SEQUENTIAL: three(1.9)}),
        row(
            throughput_over={SEQUENTIAL: three(2.9), BATCHED: three(1.3)},
            cpu_over={SEQUENTIAL: three(3.5), BATCHED: three(2.0)},
            same_tokens=0.5,
        ),
        row(part="prefix", prefix_share=0.5, ttft_over={UNCACHED: three(0.1)}),
        row(part="prefix", prefix_tokens=99, ttft_over={UNCACHED: three(0.5)}),
        row(part="prefix", prefix_tokens=99, baseline=UNCACHED, ttft_over={"engine": three(2.0)}),
        row(part="scheduler", scheduler="fcfs", completion_over={"shortest": three(1.5)}),
        row(
            part="scheduler",
            scheduler="shortest",
            completion_over={FIRST_COME: three(0.7)},
            overtaken_s=31.0,
        ),
    ]
    found = promises(rows)
    assert figure(found, SEQUENTIAL, "4 clients").met
    missed = figure(found, SEQUENTIAL, "16 clients")
    assert (
        missed.met is False
        and missed.note == "2.8 to 3; 3.5 (3.4 to 3.6) for the same processor time"
    )
    assert figure(found, BATCHED).measured == 1.3
    assert figure(found, "95th").measured == 0.5 and figure(found, "95th").met
    assert figure(found, "shortest").measured == 0.7
    assert figure(found, "let in before").met is False
    assert figure(found, "tokens of generate").measured == 0.5


def test_promises_of_nothing() -> None:
    assert {f.met for f in promises([])} == {None}
    assert {f.source for f in promises([])} == {"measured"}


def test_promises_of_steps() -> None:
    steps = [Steps(64, 64, 9, 1e-4, 2e-4, 5e-5, 3e-4, 1e-2), Steps(64, 999, 9, 1.5e-4, 1, 1, 1, 1)]
    beside, flat = findings(steps)
    assert beside.measured == pytest.approx(100) and beside.met
    assert flat.measured == pytest.approx(1.5) and flat.met is False and flat.trace == "999 tokens"


# ---- advice


def test_the_fastest_unless_another_answers_sooner() -> None:
    rows = [
        row(part="pages", page_size=16, tokens_per_s=80.0, ttft_p95_s=0.1),
        row(part="pages", page_size=32, tokens_per_s=96.0, ttft_p95_s=0.3),
        row(part="pages", page_size=64, tokens_per_s=100.0, ttft_p95_s=0.5),
        row(part="budget", token_budget=512),
        row(concurrency=4, tokens_per_s=50.0),
        row(concurrency=8, tokens_per_s=99.0),
        row(concurrency=16, tokens_per_s=100.0),
        row(concurrency=8, baseline=SEQUENTIAL, tokens_per_s=999.0),
    ]
    advice = recommend(rows)
    assert advice.setting == {"page_size": 32, "max_rows": 8}
    assert advice.reasons[0].startswith("page_size=32: 96 tokens/s")
    assert recommend([]) == Advice({}, [])


# ---- turns


def test_two_go_on_in_turns() -> None:
    import threading

    stile, order = Turnstile(2), []

    def side(number: int, tokens: int) -> None:
        for _ in range(tokens):
            order.append(number)
            stile.passes(number)
        stile.leave(number)

    first = threading.Thread(target=side, args=(0, 7))
    first.start()
    while not order:
        pass
    side(1, 5)
    first.join(60)
    assert order.count(0) == 7 and order.count(1) == 5
    middle = order[2:10]
    assert all(len(set(middle[i : i + 4])) == 2 for i in range(5)), "nobody goes on for long"
    assert [len(times) for times in stile.wall_s] == [6, 4]


def test_a_line_of_a_row() -> None:
    assert cells(row(baseline=SEQUENTIAL, kv_utilisation=None))[-1] == "-"
    line = cells(row(concurrency=1))
    assert line == ["engine", "1", "100", "100 / 200 / 300", "10.0 / 20.0", "50%"]
    later = row(part="arrivals", arrivals="poisson", rate=2.0, scheduler="shortest")
    assert situation(later) == "engine, shortest, poisson, 2/s"


# ---- the command


def test_the_command_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "serve --json --threads 1 --part concurrency --concurrency 2 --requests 4"
    files = ["--out", str(tmp_path / "a.json")]
    short = ["--repeats", "1", "--lengths", "20+5", "--pool", "64MiB"]
    assert main([*words.split(), *short, *files]) == 0
    rows = msgspec.convert(json.loads(capsys.readouterr().out), list[Row])
    assert [r.baseline for r in rows] == [SEQUENTIAL, STATIC, BATCHED, "", UNCACHED]
    assert {r.same_tokens for r in rows} == {1.0} and {r.new_tokens for r in rows} == {5}
    assert all(0 < r.ttft_p50_s <= r.ttft_p95_s <= r.ttft_p99_s for r in rows)
    assert all(r.tpot_p50_s > 0 and r.tokens_per_s > 0 for r in rows)
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["model"] == "fixture" and len(report["rows"]) == 5


def test_one_value_is_for_all_parts_and_several_are_compared() -> None:
    def plan(words: str) -> Plan:
        parser = Parser()
        command.add_verbs(lambda *_: parser)
        return command._plan(parser.parse_args(words.split()))

    one = plan("--page-size 128 --scheduler shortest --token-budget 64").setting
    assert (one.page_size, one.scheduler, one.token_budget) == (128, "shortest", 64)
    several = plan("--page-size 16,128 --scheduler fcfs,shortest")
    assert several.setting == Setting() and several.page_sizes == (16, 128)


@pytest.mark.parametrize(
    "words",
    [
        *("--part speed", "--prefix-share 120", "--baseline vllm", "--shape Qwen3-30B-A3B"),
        *("--concurrency x", "--out /nowhere/a.json"),
    ],
)
def test_wrong_words(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words.split()]) == 2
    assert capsys.readouterr().err


def test_a_shape_is_a_model_of_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.serve import ground
    from tests.inside import Decoder

    monkeypatch.setattr(ground, "SHAPES", {"small": Decoder("small", 2, 64, 4, 2, 16, 96)})
    made = Ground(shape="small", device="cpu", pool="1MiB")
    assert made.name == "small" and made.vocabulary == 128_256 and made.context == 16384
    assert made.token_bytes(64) >= 2 * 2 * 2 * 16 * 4
    assert made.pool_tokens(Setting()) * made.token_bytes(64) <= 1 << 20
    tokens = made.model.generate(
        input_ids=__import__("torch").tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False
    )
    assert tokens.shape == (1, 6)
