"""`flowkv.attention` and `flowkv.intercept` under a model of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flowkv
from flowkv import KV, Geometry, LayerGroup, Sequence
from tests.hooks.nano import Nano, generate_plain, make_nano, plain_attention
from tests.inside import GeometryError, StateError

SHAPE = Geometry.uniform(layers=2, kv_heads=2, head_dim=8, page_size=8)
PROMPTS = [[7, 3, 9, 4, 4, 1] * 4, [5], list(range(30)), [7, 3, 9, 4, 4, 1] * 4 + [2] * 9]


@pytest.fixture
def kv() -> Iterator[KV]:
    with KV(SHAPE, gpu="4MiB", namespace="nano") as cache:
        yield cache


@pytest.fixture(params=["attention", "intercept"])
def model(request: pytest.FixtureRequest) -> Iterator[Nano]:
    """The plain model under `intercept`, and one that calls `flowkv.attention` itself."""
    chosen = request.param == "attention"
    with nullcontext() if chosen else flowkv.intercept():
        yield make_nano(attend=flowkv.attention if chosen else plain_attention)


@torch.no_grad()
def generate(
    kv: KV, model: Nano, seqs: Items[Sequence], counts: Items[int], chunk: int = 11
) -> list[list[int]]:
    """Greedy tokens of a ragged batch; rows are done after different numbers of tokens."""
    last = {}
    for step in kv.prefill(seqs, chunk=chunk):
        logits = model(step.tokens, step.positions)[0]
        ends = step.counts.cumsum()
        for seq, end in zip(step.seqs, ends, strict=True):
            last[id(seq)] = int(logits[end - 1].argmax())
    made: list[list[int]] = [[last[id(seq)]] for seq in seqs]
    while rows := [i for i, count in enumerate(counts) if len(made[i]) < count]:
        with kv.step([seqs[i] for i in rows], [made[i][-1:] for i in rows]) as step:
            logits = model(step.tokens, step.positions)[0]
        for i, line in zip(rows, logits, strict=True):
            made[i].append(int(line.argmax()))
    return made


def test_ragged_batches_make_the_tokens_of_the_plain_model(kv: KV, model: Nano) -> None:
    counts = [12, 7, 20, 3]
    seqs = [kv.open(prompt) for prompt in PROMPTS]
    made = generate(kv, model, seqs, counts)
    plain = make_nano()
    assert made == [generate_plain(plain, p, n) for p, n in zip(PROMPTS, counts, strict=True)]
    assert len({tuple(line[:3]) for line in made}) > 1, "the model says the same to everyone"


def test_a_conversation_computes_only_what_is_new(kv: KV, model: Nano) -> None:
    plain, talk, computed = make_nano(), list(PROMPTS[0]), []
    for turn in range(4):
        with kv.open(talk) as seq:
            computed.append(len(talk) - seq.reused)
            (answer,) = generate(kv, model, [seq], [9])
        assert answer == generate_plain(plain, talk, 9)
        talk += [*answer, 40 + turn, 3]
    assert computed[0] == len(PROMPTS[0]) and max(computed[1:]) < 11 + 8
    assert kv.stats()["hit_rate"] > 0.5


def test_forks_go_their_own_ways(kv: KV, model: Nano) -> None:
    plain, seq = make_nano(), kv.open(PROMPTS[0])
    generate(kv, model, [seq], [1])
    branches = [seq, kv.fork(seq), kv.fork(seq)]
    tails = [[[token] for token in line] for line in ([1, 2, 3], [4, 5, 6], [1, 5, 3])]
    for position in range(3):
        with torch.no_grad(), kv.step(branches, [line[position] for line in tails]) as step:
            logits = model(step.tokens, step.positions)[0]
    for line, got in zip(tails, logits, strict=True):
        tokens = PROMPTS[0] + [token for (token,) in line]
        want = plain(torch.tensor([tokens]))[0, -1]
        assert torch.allclose(got, want, atol=1e-5)


def test_training_code_outside_steps_keeps_its_gradients(kv: KV, model: Nano) -> None:
    model.requires_grad_(True)
    tokens = torch.tensor([PROMPTS[2], PROMPTS[2][::-1]])
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    plain = make_nano().requires_grad_(True)
    F.cross_entropy(plain(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert want.grad.abs().max() > 0
        assert torch.equal(got.grad, want.grad)
    assert kv.stats()["devices"]["cpu"]["used_bytes"] == 0


def test_gradients_through_pages_are_refused_before_anything_is_written(
    kv: KV, model: Nano
) -> None:
    model.requires_grad_(True)
    with kv.open(PROMPTS[2]) as seq:
        with pytest.raises(StateError, match=r"torch\.no_grad\(\)"), torch.enable_grad():
            for step in kv.prefill([seq]):
                model(step.tokens, step.positions)
        assert seq.length == 0
        with torch.no_grad():
            for step in kv.prefill([seq]):
                logits = model(step.tokens, step.positions)
            want = make_nano()(torch.tensor([PROMPTS[2]]))
        torch.testing.assert_close(logits[:, -1], want[:, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "sinks", "alibi"])
def test_whatever_wants_gradients_in_a_step_is_refused(kv: KV, wanted: str) -> None:
    given = {name: torch.ones(1, 2, 3, 8) for name in "qkv"}
    given |= {name: torch.ones(2) for name in ("sinks", "alibi")}
    given[wanted].requires_grad_(True)
    refused = pytest.raises(StateError, match="gradients")
    with kv.open([1, 2, 3]) as seq, refused, kv.step([seq], [[1, 2, 3]]):
        flowkv.attention(**given, layer=0)
    with kv.open([4, 5, 6], limit=0) as seq, torch.no_grad(), kv.step([seq], [[4, 5, 6]]):
        for layer in range(2):
            flowkv.attention(**given, layer=layer)


def test_attention_outside_a_step_is_causal_attention() -> None:
    q, k, v = (torch.randn(2, heads, 9, 8) for heads in (4, 2, 2))
    got = flowkv.attention(q, k, v, layer=0, scale=0.3)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.equal(got, want)


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"sinks": torch.zeros(4)}])
def test_options_that_pytorch_lacks_are_refused_outside_a_step(option: dict[str, object]) -> None:
    x = torch.randn(1, 4, 3, 8)
    with pytest.raises(StateError, match="inside a step only"):
        flowkv.attention(x, x, x, layer=0, **option)


def test_softcap_and_sinks_inside_a_step(kv: KV) -> None:
    count, sinks = 5, torch.randn(4)
    q, k, v = (torch.randn(1, heads, count, 8) for heads in (4, 2, 2))
    seq = kv.open([1] * count)
    with kv.step([seq], [[1] * count]) as step:
        for layer in (0, 1):
            got = flowkv.attention(q, k, v, layer=layer, softcap=2.0, sinks=sinks, scale=1.0)
        assert step.open
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    logits = torch.tanh(q @ k.transpose(2, 3) / 2.0) * 2.0
    logits += torch.full((count, count), -torch.inf).triu(1)
    logits = torch.cat([logits, sinks.view(1, 4, 1, 1).expand(1, 4, count, 1)], 3)
    want = logits.softmax(3)[..., :-1] @ v
    assert torch.allclose(got, want, atol=1e-5)


# ---- misuse


def shapes(*, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(q), torch.randn(k), torch.randn(v)]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (shapes(q=(1, 4, 3, 8), k=(1, 2, 4, 8), v=(1, 2, 3, 8)), "in a step of 3 tokens"),
        (shapes(q=(1, 4, 3, 8), k=(1, 2, 3, 8), v=(1, 2, 2, 8)), "in a step of 3 tokens"),
        (shapes(q=(2, 4, 3, 8), k=(2, 2, 3, 8), v=(2, 2, 3, 8)), "in a step of 3 tokens"),
        (shapes(q=(4, 3, 8), k=(2, 3, 8), v=(2, 3, 8)), "in a step of 3 tokens"),
        (shapes(q=(1, 4, 3, 8), k=(1, 3, 3, 8), v=(1, 2, 3, 8)), "k has shape"),
        (shapes(q=(1, 4, 3, 8), k=(1, 2, 3, 8), v=(1, 2, 3, 16)), "v has shape"),
        (shapes(q=(1, 3, 3, 8), k=(1, 2, 3, 8), v=(1, 2, 3, 8)), "3 query heads"),
    ],
)
def test_wrong_shapes_are_refused_and_roll_back(
    kv: KV, tensors: list[torch.Tensor], message: str
) -> None:
    seq = kv.open([1, 2, 3])
    with pytest.raises(GeometryError, match=message), kv.step([seq], [[1, 2, 3]]):
        flowkv.attention(*tensors, layer=0)
    assert seq.length == 0 and flowkv.cache.step.current_step() is None


def test_unknown_layers_and_other_dtypes_are_refused(kv: KV) -> None:
    seq, (q, k, v) = kv.open([1]), shapes(q=(1, 4, 1, 8), k=(1, 2, 1, 8), v=(1, 2, 1, 8))
    with pytest.raises(GeometryError, match="layer 2 is in no group"), kv.step([seq], [[1]]):
        flowkv.attention(q, k, v, layer=2)
    with pytest.raises(GeometryError, match="geometry keeps"), kv.step([seq], [[1]]):
        flowkv.attention(q.double(), k.double(), v.double(), layer=0)
    assert seq.length == 0


def test_a_model_that_leaves_a_layer_out_is_found_out(kv: KV) -> None:
    seq, (q, k, v) = kv.open([1] * 9), shapes(q=(1, 4, 9, 8), k=(1, 2, 9, 8), v=(1, 2, 9, 8))
    missing = pytest.raises(StateError, match=r"no keys and values for layers \[1\]")
    with missing, kv.step([seq], [[1] * 9]):
        flowkv.attention(q, k, v, layer=0)
    assert seq.length == 0
    assert kv.explain([1] * 10).known == 0


def check_tokens(kv: KV, way: str, attend: Any) -> None:
    """A model of such an attention gives the tokens of the plain one, alone and in a batch."""
    model, seqs = make_nano(attend=attend), [kv.open(prompt) for prompt in PROMPTS]
    with flowkv.intercept() if way == "intercept" else nullcontext():
        for counts, rows in (([9], seqs[:1]), ([5, 8, 3], seqs[1:])):
            for seq, tokens in zip(rows, generate(kv, model, rows, counts), strict=True):
                prompt = PROMPTS[seqs.index(seq)]
                assert tokens == generate_plain(make_nano(), prompt, len(tokens))


@pytest.mark.parametrize("way", ["attention", "intercept"])
@pytest.mark.parametrize("repeated", [False, True])
def test_causal_with_several_tokens_and_repeated_heads(kv: KV, way: str, repeated: bool) -> None:
    """As models say it: `is_causal=T > 1`, with the heads of keys repeated for the queries."""

    def guarded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, layer: int) -> torch.Tensor:
        if repeated:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        causal = q.shape[2] > 1
        if way == "attention":
            return flowkv.attention(q, k, v, layer=layer, is_causal=causal)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=not repeated)

    check_tokens(kv, way, guarded)


def seen(count: int, window: int | None = None) -> torch.Tensor:
    """Who sees whom among `count` tokens, bool."""
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    return causal if window is None else causal.triu(1 - window)


def added(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("way", ["attention", "intercept"])
@pytest.mark.parametrize("said", ["bool", "added", "by head"])
def test_masks_that_say_the_causal_rule(kv: KV, way: str, said: str) -> None:
    """As a model without a cache builds them, of the tokens that it is given."""

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, layer: int) -> torch.Tensor:
        mask = seen(q.shape[2])
        if said == "added":
            mask = added(mask)
        if said == "by head":
            mask = mask.expand(1, q.shape[1], -1, -1)
        if way == "attention":
            return flowkv.attention(q, k, v, layer=layer, attn_mask=mask)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    check_tokens(kv, way, masked)


@pytest.mark.parametrize("way", ["group", "full group"])
@pytest.mark.parametrize("masked", [False, True])
def test_windows_in_steps_and_outside(way: str, masked: bool) -> None:
    window = 5
    own = window if way == "group" else None
    shape = Geometry.uniform(layers=1, kv_heads=2, head_dim=8, page_size=8, window=own)
    q, k, v = shapes(q=(1, 4, 13, 8), k=(1, 2, 13, 8), v=(1, 2, 13, 8))
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen(13, window), enable_gqa=True)
    with KV(shape, gpu="1MiB") as kv:
        seq, got = kv.open(list(range(13))), []
        for start, end in ((0, 7), (7, 12), (12, 13)):
            mask = seen(end - start, window) if masked else None
            part = [x[:, :, start:end] for x in (q, k, v)]
            with kv.step([seq], [range(start, end)]):
                said = None if own else window
                got.append(flowkv.attention(*part, layer=0, window=said, attn_mask=mask))
    assert torch.allclose(torch.cat(got, 2), want, atol=1e-5)
    outside = flowkv.attention(q, k, v, layer=0, window=window)
    assert torch.allclose(outside, want, atol=1e-6)


def test_slopes_by_distance_in_steps_and_outside(kv: KV) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    q, k, v = shapes(q=(1, 4, 20, 8), k=(1, 2, 20, 8), v=(1, 2, 20, 8))
    distance = torch.arange(20) - torch.arange(20).unsqueeze(1)
    bias = (slopes.view(4, 1, 1) * distance).masked_fill(~seen(20), -torch.inf)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    seqs = [kv.open(list(range(20))) for _ in range(2)]  # two rows share what cascades would read
    for start, end in ((0, 19), (19, 20)):
        part = [x[:, :, start:end].repeat(1, 1, 2, 1) for x in (q, k, v)]
        with kv.step(seqs, [range(start, end)] * 2):
            for layer in (0, 1):
                got = flowkv.attention(*part, layer=layer, alibi=slopes)
        for row in got.chunk(2, dim=2):
            assert torch.allclose(row, want[:, :, start:end], atol=1e-5)
    assert torch.allclose(flowkv.attention(q, k, v, layer=0, alibi=slopes), want, atol=1e-6)


def test_what_pages_do_not_serve_is_refused(kv: KV) -> None:
    q, k, v = shapes(q=(1, 4, 6, 8), k=(1, 2, 6, 8), v=(1, 2, 6, 8))
    seq = kv.open(list(range(6)))
    for mask in (seen(6, 3), seen(6).T, added(seen(6)) + torch.randn(6, 6), seen(5), ~seen(6)):
        with pytest.raises(GeometryError, match="other tokens"), kv.step([seq], [range(6)]):
            flowkv.attention(q, k, v, layer=0, attn_mask=mask)
        missing = pytest.raises((StateError, RuntimeError), match=r"no keys|size of")
        with missing, flowkv.intercept(), kv.step([seq], [range(6)]):
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    with flowkv.intercept(), pytest.raises(StateError), kv.step([seq], [range(6)]):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True, enable_gqa=True)
    assert seq.length == 0
    for kind, message in (("sliding", "its group keeps 4"), ("chunked", "no kernel over pages")):
        group = LayerGroup(layers=(0,), kv_heads=2, head_dim=8, value_dim=8, kind=kind, window=4)
        with KV(Geometry(groups=(group,), page_size=8), gpu="1MiB") as other:
            seq = other.open(list(range(6)))
            with pytest.raises(GeometryError, match=message), other.step([seq], [range(6)]):
                flowkv.attention(q, k, v, layer=0, window=5)


def test_looking_ahead_and_other_heads_are_refused(kv: KV) -> None:
    q, k, v = shapes(q=(1, 4, 2, 8), k=(1, 2, 2, 8), v=(1, 2, 2, 8))
    seq = kv.open([1, 2])
    with pytest.raises(GeometryError, match="other tokens"), kv.step([seq], [[1, 2]]):
        flowkv.attention(q, k, v, layer=0, is_causal=False)
    different = torch.randn(1, 4, 2, 8)
    with pytest.raises(GeometryError, match="different heads"), kv.step([seq], [[1, 2]]):
        flowkv.attention(q, different, different, layer=0)
    assert seq.length == 0


def test_attention_after_the_end_of_its_step_is_refused(kv: KV) -> None:
    model, seq = make_nano(attend=flowkv.attention), kv.open([1, 2])
    over = pytest.raises(StateError, match="step is over")
    with over, torch.no_grad(), kv.step([seq], [[1, 2]]) as step:
        model(step.tokens, step.positions)
        step.commit()
        model(step.tokens, step.positions)
    assert seq.length == 2


def test_intercept_counts_layers_and_leaves_other_attention_alone(kv: KV) -> None:
    q, k, v = shapes(q=(1, 4, 2, 8), k=(1, 2, 2, 8), v=(1, 2, 2, 8))
    mask = torch.ones(2, 5, dtype=torch.bool)
    memory = torch.randn(1, 4, 5, 8)
    cross = F.scaled_dot_product_attention(q, memory, memory, attn_mask=mask)
    seq = kv.open([1, 2])
    with flowkv.intercept():
        often = pytest.raises(GeometryError, match="more often than the geometry's 2 layers")
        with often, kv.step([seq], [[1, 2]]):
            for _ in range(3):
                F.scaled_dot_product_attention(q, k, v, None, 0.0, True, enable_gqa=True)
        with kv.step([seq], [[1, 2]]):
            first = F.scaled_dot_product_attention(q, k, v, None, 0.0, True, enable_gqa=True)
            assert torch.equal(
                F.scaled_dot_product_attention(q, memory, memory, attn_mask=mask), cross
            )
            F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True, enable_gqa=True)
        outside = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(first, outside, atol=1e-6) and seq.length == 2


def test_intercept_numbers_layers_as_the_geometry_lists_them() -> None:
    groups = [
        LayerGroup(layers=(i,), kv_heads=2, head_dim=8, value_dim=8, kind=kind, window=window)
        for i, (kind, window) in enumerate((("sliding", 4), ("full", None)))
    ]
    shape = Geometry(groups=(groups[1], groups[0]), page_size=8)
    kv = KV(shape, gpu="1MiB")
    seq = kv.open(list(range(10)))
    q, k, v = shapes(q=(1, 2, 10, 8), k=(1, 2, 10, 8), v=(1, 2, 10, 8))
    with flowkv.intercept(), kv.step([seq], [range(10)]):
        local = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        wide = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(wide, want, atol=1e-5) and not torch.allclose(local, want, atol=1e-2)
    kv.close()
