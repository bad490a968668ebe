"""A prompt that is known but for its last token is answered by a captured decode step."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

import flowkv
from tests.cache.audit import audit
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate
from tests.hooks.recorder import recorded
from tests.hooks.test_graphs import (
    PROMPT,
    WAYS,
    Nano,
    both,
    capturing,
    counts,
    data,
    every_token_is_a_replay,
    geometry,
    hooked,
    in_place,
    moved,
    reused,
    swapped,
)
from tests.hooks.test_restore import restoring, stored
from tests.inside import CapacityError, GraphedForward, Later, Restoring, StaticStep, door


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where models run: on a CPU, where recordings stand in for graphs, and on a GPU."""
    return str(request.param)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", ["llama", pytest.param("qwen3", marks=pytest.mark.thorough), "gemma3", "gpt_oss"]
)
def test_every_token_is_a_replay(name: str, way: str) -> None:
    """Padding, beams and windows included; on a CPU, `test_replays_answer_as_the_model` asks it."""
    (model, twin), given = both(name, "cuda"), moved(WAYS[way], "cuda")
    with attached(model) as kv:
        for _ in range(2):  # until all shapes are captured
            generate(model, 30, **given)
        if (name, way) == ("gpt_oss", "beams"):  # see `test_replays_answer_as_the_model`
            assert "run eagerly" in kv.explain(PROMPT[0]).decoding
            return
        every_token_is_a_replay(kv, model, twin, given)


def test_a_first_token_is_learned_from(device: str) -> None:
    """Prompts of which one token at a time is asked have no decode steps to capture."""
    (model, twin), given = both("llama", device), moved(WAYS["batch"], device)
    with capturing(device), attached(model) as kv:
        for turn in range(6):
            assert_same(generate(model, 1, **given), generate(twin, 1, **given))
            assert counts(kv) == (int(turn > 2), max(0, turn - 3))


@pytest.mark.parametrize("length", [1, 16, 17, 32, 33])
def test_prompts_that_end_at_the_edge_of_a_page(length: int, device: str) -> None:
    model, twin = both("llama", device)
    ids = models.prompt(length).to(device)
    with capturing(device), attached(model) as kv:
        for _ in range(5):
            assert_same(generate(model, 2, input_ids=ids), generate(twin, 2, input_ids=ids))
        replayed = counts(kv)[1]
        assert_same(generate(model, 2, input_ids=ids), generate(twin, 2, input_ids=ids))
        assert counts(kv)[1] == replayed + 2


@pytest.mark.parametrize("length", [32, 64])
def test_a_graph_of_longer_rows_serves_shorter_ones(length: int, device: str) -> None:
    """The prompt fills pages of which the tokens behind it need twice as many, by powers of two."""
    (model, twin), ids = both("llama", device), models.prompt(length).to(device)
    with capturing(device), attached(model) as kv:
        generate(model, 12, input_ids=ids)
        captured, replayed = counts(kv)
        assert captured == 1 and replayed > 5
        assert_same(generate(model, 3, input_ids=ids), generate(twin, 3, input_ids=ids))
        assert counts(kv) == (1, replayed + 3)


def test_a_prompt_whose_cache_is_held_is_asked_again(device: str) -> None:
    """Its last page is still open, and is copied; neither answer disturbs the other."""
    (model, twin), given = both("llama", device), moved(WAYS["one"], device)
    with capturing(device), attached(model) as kv:
        held = [generate(model, 8, **given) for _ in range(4)]
        replayed = counts(kv)[1]
        held.append(generate(model, 8, **given))
        assert counts(kv)[1] == replayed + 8
        for out in held:
            assert_same(out, generate(twin, 8, **given))
        for out in held[-2:]:
            place = torch.tensor([[27]], device=device)
            more = dict(past_key_values=out.past_key_values, position_ids=place)
            wanted = twin(input_ids=out.sequences).logits[:, -1]
            with torch.no_grad():
                logits = model(input_ids=out.sequences[:, -1:], **more).logits[:, -1]
            torch.testing.assert_close(logits, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("change", [swapped, data, in_place, hooked])
@pytest.mark.filterwarnings("ignore:FlowKV shares nothing")
def test_a_change_between_two_prompts(change: Callable[[Any], None], device: str) -> None:
    """Neither pages nor graphs of the model as it was answer then."""
    (model, twin), given = both("llama", device), moved(WAYS["one"], device)
    with capturing(device), attached(model) as kv:
        for _ in range(2):
            generate(model, 12, **given)
        for each in (model, twin):
            change(each)
        replayed = counts(kv)[1]
        for turn in range(3):
            assert_same(generate(model, 1, **given), generate(twin, 1, **given))
            assert counts(kv)[1] == replayed, turn


@pytest.mark.parametrize("asked", ["output_attentions", "output_hidden_states"])
@pytest.mark.filterwarnings("ignore:FlowKV computes prompts whose hidden states")
def test_more_than_logits_is_computed(asked: str) -> None:
    model, twin = models.causal("llama"), models.causal("llama")
    for each in (model, twin):
        each.set_attn_implementation("eager")
    with recorded(), attached(model) as kv:
        generate(model, 12, input_ids=PROMPT)
        replayed = counts(kv)[1]
        ours, theirs = (
            generate(each, 2, input_ids=PROMPT, **{asked: True}) for each in (model, twin)
        )
        assert_same(ours, theirs)
        name = asked.removeprefix("output_")
        for a, b in zip(ours[name][0], theirs[name][0], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
        assert counts(kv)[1] == replayed


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_logits_that_a_forward_asks_for(keep: int, device: str) -> None:
    """A forward that wants those of several tokens computes these, whatever is known."""
    model, twin = both("llama", device)
    ids = PROMPT.to(device)
    with capturing(device), attached(model) as kv, torch.no_grad():
        generate(model, 12, input_ids=ids)
        replayed = counts(kv)[1]
        found = []
        for each in (model, twin):
            cache = DynamicCache(config=each.config)
            places = torch.arange(20, device=device)[None]
            given = dict(position_ids=places, past_key_values=cache, logits_to_keep=keep)
            found.append(each(input_ids=ids, **given).logits)
        torch.testing.assert_close(*found, rtol=2e-4, atol=2e-4)
        assert counts(kv)[1] == replayed + (keep == 1)


@pytest.mark.usefixtures("all_is_loaded")
@pytest.mark.parametrize("length", [96, 97])
@pytest.mark.parametrize("rows", [1, 2])
def test_pages_that_come_from_host_memory(rows: int, length: int, device: str) -> None:
    """Once there are graphs, loads are waited for, and a replay goes on from there."""
    model, twin = both("llama", device)
    prompts = [models.prompt(length, seed=seed).repeat(rows, 1).to(device) for seed in range(6)]
    prompts = [ids + torch.arange(rows, device=device)[:, None] for ids in prompts]
    # Of the others, some rows would find pages on the device, which restoring the first one takes.
    options = dict(gpu=f"{256 * rows}KiB", host="8MiB", policy="lru")
    with capturing(device), attached(model, **options) as kv:
        for ids in prompts:
            generate(model, 8, input_ids=ids)
        for ids in prompts:
            replayed = counts(kv)[1]
            out = generate(model, 3, input_ids=ids)
            assert counts(kv)[1] == replayed + 3, kv.stats()["graphs"]
            known = kv.explain(out.sequences[0])  # a page that the replay filled included
            assert known.residency == {"device": length}, str(known)
            assert_same(out, generate(twin, 3, input_ids=ids))
        assert kv.stats()["tiers"]["host"]["loaded_bytes"] > 0


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_short_prompts_and_next_turns_are_replays(name: str, device: str) -> None:
    """Of any length up to a bound, unseen or behind a known prefix; what they fill is known."""
    (model, twin), turns = both(name, device), [models.prompt(n, seed=n) for n in range(20, 29)]
    with capturing(device), attached(model) as kv:
        for number, ids in enumerate(turns):
            replayed, known = counts(kv)[1], reused(kv)
            out = generate(model, 5, input_ids=ids.to(device))
            assert_same(out, generate(twin, 5, input_ids=ids.to(device)))
            if number > 5:
                assert counts(kv)[1] == replayed + 5 and reused(kv) == known
        ids = out.sequences
        for number in range(8):  # turns of a chat
            said = models.prompt(7 + number, seed=99 - number).to(device)
            ids, replayed, known = torch.cat([ids, said], 1), counts(kv)[1], reused(kv)
            out = generate(model, 5, input_ids=ids)
            assert_same(out, generate(twin, 5, input_ids=ids))
            assert reused(kv) > known
            ids = out.sequences
        assert counts(kv)[1] >= replayed + 4
        out = generate(model, 5, input_ids=turns[-1].to(device))
        assert_same(out, generate(twin, 5, input_ids=turns[-1].to(device)))
        assert not kv.stats()["graphs"]["eager"]
        audit(kv)


@pytest.mark.parametrize(
    "given",
    [dict(attention_mask=torch.tensor([[0] * 3 + [1] * 17])), dict(num_beams=2)],
    ids=["padded", "beams"],
)
def test_other_short_prompts_are_computed_by_the_model(given: dict[str, Any]) -> None:
    model, twin = both("llama", "cpu")
    with recorded(), attached(model) as kv:
        for seed in range(5):
            ids = models.prompt(20, seed=seed)
            mine, theirs = (generate(one, 5, input_ids=ids, **given) for one in (model, twin))
            assert_same(mine, theirs)
        audit(kv)


def test_a_short_prompt_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts stay with the model, and decode steps are replayed all the same."""
    own = GraphedForward._capture

    def capture(self: GraphedForward, step: Any, shape: Any, *given: Any) -> Any:
        if shape.new > 1:
            raise RuntimeError("not this one")
        return own(self, step, shape, *given)

    monkeypatch.setattr(GraphedForward, "_capture", capture)
    model, twin = both("llama", "cpu")
    with recorded(), attached(model) as kv:
        for seed in range(6):
            ids = models.prompt(20, seed=seed)
            assert_same(generate(model, 9, input_ids=ids), generate(twin, 9, input_ids=ids))
        assert counts(kv)[1] > 20 and not kv.stats()["graphs"]["eager"]


def test_logits_of_chosen_tokens_once_there_are_graphs() -> None:
    (model, twin), found = both("llama", "cpu"), list[torch.Tensor]()
    with recorded(), attached(model) as kv, torch.no_grad():
        for seed in range(4):
            generate(model, 9, input_ids=models.prompt(20, seed=seed))
        assert counts(kv)[0] >= 2
        for one in (model, twin):
            cache, ids = DynamicCache(config=one.config), models.prompt(30, seed=9)
            one(input_ids=ids[:, :20], past_key_values=cache, logits_to_keep=1)
            chosen = dict(past_key_values=cache, logits_to_keep=torch.tensor([0, 4]))
            found.append(one(input_ids=ids[:, 20:], **chosen).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_shapes_in_turn_are_not_captured_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkv.hooks.graphs.MOST_GRAPHS", 1)
    model, twin = both("llama", "cpu")
    with recorded(), attached(model) as kv:
        for turn in range(16):
            ids = models.prompt(20 if turn % 2 else 40, seed=turn)
            assert_same(generate(model, 1, input_ids=ids), generate(twin, 1, input_ids=ids))
        assert 1 <= counts(kv)[0] <= 3


def test_a_capture_with_the_right_logits_and_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of all tokens but the last fails: what a capture writes into pages shows it."""
    own = StaticStep.read

    def read(self: StaticStep, *given: Any, **options: Any) -> torch.Tensor:
        out = own(self, *given, **options)
        kept = torch.arange(len(out)) == self.last
        return out * kept[:, None, None] if self.shape.new > 1 else out

    monkeypatch.setattr(StaticStep, "read", read)
    model, twin = both("llama", "cpu")
    with recorded() as made, attached(model) as kv:
        for seed in range(6):
            ids = models.prompt(20, seed=seed)
            assert_same(generate(model, 9, input_ids=ids), generate(twin, 9, input_ids=ids))
        assert len(made) > counts(kv)[0] and not kv.stats()["graphs"]["eager"]


@pytest.mark.parametrize("lose", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rows", [1, 2])
def test_pages_that_are_lost_on_their_way(rows: int, lose: float) -> None:
    """What does not come is computed, and a replay goes on from there all the same."""
    model, twin = models.causal("llama"), models.causal("llama")
    ids, other = (models.prompt(193, seed=seed).repeat(rows, 1) for seed in range(2))
    frames = stored(model, dict(input_ids=ids))
    with recorded(), restoring(model, frames, 0.3) as (kv, tier, seen):
        generate(model, 6, input_ids=other)
        tier.lose, (captured, replayed) = lose, counts(kv)
        assert captured
        assert_same(generate(model, 3, input_ids=ids), generate(twin, 3, input_ids=ids))
        assert seen.ended and bool(tier.lost) == bool(lose)
        assert counts(kv)[1] == replayed + 3
        audit(kv)


def test_pages_that_neither_come_nor_can_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward begins where they end."""
    model, twin = models.causal("llama"), models.causal("llama")
    ids, other = (models.prompt(193, seed=seed) for seed in range(2))
    frames = stored(model, dict(input_ids=ids))

    def full(*_: Any) -> None:
        raise CapacityError("the pages are full", "Close sequences")

    with recorded(), restoring(model, frames, 0.3) as (kv, tier, seen):
        generate(model, 6, input_ids=other)
        tier.lose = 1.0
        monkeypatch.setattr(Restoring, "_mend", full)
        assert counts(kv)[0]
        assert_same(generate(model, 3, input_ids=ids), generate(twin, 3, input_ids=ids))
        assert seen.ended and tier.lost
        audit(kv)


def test_a_known_prompt_of_a_model_of_ones_own(device: str) -> None:
    model, place = Nano().to(device), device if device == "cpu" else f"{device}:0"
    tokens, logits = [*range(7, 27)], list[torch.Tensor]()
    with (
        capturing(device),
        flowkv.KV(geometry(2, 16, device=place), gpu="8MiB") as kv,
        torch.no_grad(),
    ):
        run = flowkv.graphed(model, kv)
        for _ in range(6):
            with kv.open(tokens) as seq:
                for step in kv.prefill([seq]):
                    found = run(step.tokens, step.positions)
            logits.append(found[0, -1])
        assert counts(kv) == (1, 2)
    for each in logits[1:]:
        torch.testing.assert_close(each, logits[0], rtol=2e-4, atol=2e-4)


def test_a_known_prompt_in_a_step_of_an_engine(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in a replayed step with those that decode."""
    model, twin = both("llama", device)
    prompts = [models.prompt(n, seed=n)[0].tolist() for n in (20, 12)]
    learn, ran = GraphedForward.record_step, list[int]()

    def watched(self: GraphedForward, step: Any, *args: Any) -> None:
        ran.append(len(step.seqs))
        learn(self, step, *args)

    monkeypatch.setattr(GraphedForward, "record_step", watched)
    with capturing(device), attached(model) as kv, flowkv.Engine(model, kv, max_rows=2) as engine:
        for turn in range(12):  # one may begin before the other: such a step is learned first
            ran.clear()
            replayed = counts(kv)[1]
            answers = [engine.submit(ids, max_new_tokens=12) for ids in prompts]
            for ids, answer in zip(prompts, answers, strict=True):
                given = torch.tensor([ids], device=device)
                wanted = generate(twin, 12, input_ids=given).sequences[0, len(ids) :]
                assert list(answer.result().tokens) == wanted.tolist()
            if turn > 2 and not ran:
                break
        assert not ran and counts(kv)[1] >= replayed + 12


# What happens before the replay


class Reads(TorchFunctionMode):
    """Notes where the host reads what a device computes."""

    names_flowkv_pages = True

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.here = list[str](), list[torch.Tensor]()

    def note(self) -> None:
        self.reads.append("".join(traceback.format_stack(limit=5)[:-2]))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and not any(each.data_ptr() == args[0].data_ptr() for each in self.here):
            self.note()
        return func(*args, **(kwargs or {}))


READS = frozenset(
    (
        *(torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero),
        *(torch.Tensor.equal, torch.Tensor.__bool__, torch.Tensor.__int__),
        *(torch.Tensor.__float__, torch.equal, torch.nonzero, torch.unique),
    )
)


@pytest.mark.parametrize(
    ("way", "length", "options", "most"),
    [
        ("one", 20, {}, 1),
        ("one", 2, {}, 2),
        ("batch", 20, {}, 1),
        ("one", 20, dict(codec="kv8", recent_tokens=0), 2),
    ],
    ids=["page", "tail", "batch", "kv8"],
)
def test_reads_before_the_first_token(
    way: str, length: int, options: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, mask and positions are read together; pages that were checked are not checked again."""
    model, mode, counted = models.causal("llama"), Reads(), list[list[str]]()
    own, get = door.ForwardHook.before, Later.result

    def before(*given: Any) -> Any:
        mode.reads.clear()
        with mode:
            found = own(*given)
        counted.append([*mode.reads])
        return found

    def waited(self: Later) -> Any:
        found = get(self)
        if any(each is not None for each in found):
            mode.note()
        mode.here += [each for each in found if each is not None]
        return found

    monkeypatch.setattr(door, "modes", partial(door.modes, own=False))
    monkeypatch.setattr(Later, "result", waited)
    monkeypatch.setattr(door.ForwardHook, "before", before)
    with recorded(), attached(model, **options) as kv:
        for _ in range(3):
            generate(model, length, **WAYS[way])
        replayed = counts(kv)[1]
        generate(model, 1, **WAYS[way])
        assert counts(kv)[1] == replayed + 1
    assert len(counted[-1]) <= most, "\n".join(counted[-1])
