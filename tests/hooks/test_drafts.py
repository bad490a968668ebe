"""Drafts: what is proposed and accepted is the same without FlowKV, cold, warm and restarted.

Equal tokens alone would not show a draft that goes on from a wrong cache: the target rejects what
it proposes, and the answer is right and slow. So each proposal is compared as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import modeling_layers
from transformers.generation import candidate_generator

from . import models
from .compare import attached, generate, reused

thorough = pytest.mark.thorough
pytestmark = pytest.mark.usefixtures("all_is_loaded")  # reuse is counted
NEW, WORDS = 14, 6
HIDDEN = "ignore:FlowKV computes prompts whose hidden states"
Proposals = list[tuple[int, list[int]]]
"""Length of the text and the tokens proposed behind it, for each round of drafting."""


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    found: Proposals = []

    def recorded(own: Callable[..., Any]) -> Callable[..., Any]:
        def get_candidates(self: Any, input_ids: torch.Tensor, *args: Any, **given: Any) -> Any:
            answer = own(self, input_ids, *args, **given)
            length = input_ids.shape[1]
            found.append((length, answer[0][0, length:].tolist()))
            return answer

        return get_candidates

    for value in list(vars(candidate_generator).values()):
        if isinstance(value, type) and "get_candidates" in vars(value):
            monkeypatch.setattr(value, "get_candidates", recorded(vars(value)["get_candidates"]))
    return found


def gpt_neox() -> torch.nn.Module:
    torch.manual_seed(0)
    settings = {k: v for k, v in models.SMALL.items() if k != "num_key_value_heads"}
    return models.sharpen(transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**settings)))


def reuse(name: str, lives: list[list[list[int]]]) -> tuple[list[int], list[list[int]]]:
    """Return the tokens reused by the first prompt, and by those that are known when asked.

    Later turns replace the recurrent states of earlier ones, which are not asked for again.
    """
    asked = 3 if name in models.RECURRENT else 5
    return lives[0][0], [*lives[0][1:asked], *lives[1][:asked]]


def target(name: str) -> Any:
    return gpt_neox() if name == "gpt_neox" else models.causal(name)


def nearly(model: Any) -> Any:
    """Return a copy of a model that mostly, but not always, says the same."""
    twin, source = copy.deepcopy(model), torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in twin.parameters():
            weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=source)
    config = twin.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = 4, "constant"
    config.assistant_confidence_threshold = 0.0
    return twin


class Subject(NamedTuple):
    """A target, the options that let it draft, and the models that can be attached."""

    model: Any
    how: dict[str, Any]
    attachable: tuple[Any, ...]


def talk(subject: Subject, seed: int, words: int) -> list[torch.Tensor]:
    """Return the prompts of three turns, and the first two again."""
    found = [models.prompt(30).repeat(1, 3) % words]
    for turn in range(2):
        torch.manual_seed(seed)
        said = generate(subject.model, NEW, input_ids=found[-1], **subject.how).sequences
        found.append(torch.cat([said, models.prompt(5, seed=turn) % words], 1))
    return [*found, *found[:2]]


def check(
    make: Callable[[], Subject],
    who: tuple[int, ...],
    proposals: Proposals,
    path: Path,
    *,
    words: int = 250,
    **how: Any,
) -> list[list[list[int]]]:
    """Compare a talk without FlowKV with one in each of two lives over one store.

    Returns:
        For each life and prompt: the tokens reused by each attached model.
    """
    plain = make()
    plain.how.update(how)
    prompts = talk(plain, 5, words)

    def ask(subject: Subject, ids: torch.Tensor) -> tuple[torch.Tensor, Proposals]:
        proposals.clear()
        torch.manual_seed(5)
        given = dict(input_ids=ids, attention_mask=torch.ones_like(ids), **subject.how)
        return generate(subject.model, NEW, **given).sequences, list(proposals)

    wanted, known = [ask(plain, ids) for ids in prompts], []
    assert all(any(tokens for _, tokens in rounds) for _, rounds in wanted), "nothing is proposed"
    for _ in range(2):
        subject = make()
        subject.how.update(how)
        with ExitStack() as stack:
            opened = [
                stack.enter_context(
                    attached(subject.attachable[index], disk=f"{path}/{index}:64MiB")
                )
                for index in who
            ]
            known.append(list[list[int]]())
            for ids, (tokens, rounds) in zip(prompts, wanted, strict=True):
                before = [reused(kv) for kv in opened]
                answer, drafts = ask(subject, ids)
                assert all(kv.flush(60) for kv in opened)  # a state on its way down is a miss
                assert torch.equal(answer, tokens)
                assert drafts == rounds, "the draft went on from something else"
                known[-1].append([reused(kv) - n for kv, n in zip(opened, before, strict=True)])
    return known


def accepted(proposals: Proposals) -> Iterator[tuple[int, int]]:
    """Yield (accepted, proposed) of each round but the last."""
    for (length, tokens), (after, _) in pairwise(proposals):
        yield after - length - 1, len(tokens)


# ---- another model drafts, or the target itself, from its first layers or from its prompt

DRAFTED = ["llama", "gemma3", "deepseek_v3", "gpt_neox", "lfm2", *models.INDEXED[1:2]]
WHO = {"both": (0, 1), "the target": (0,), "the draft": (1,)}


def turns(ways: Iterable[str], fast: Collection[str]) -> Iterator[Any]:
    """Every model in every way, greedy and sampled in turn: any two of the three meet."""
    for (n, name), (w, way) in product(enumerate(DRAFTED), enumerate(ways)):
        marks = [] if name in ("llama", "lfm2") and way in fast else [thorough]
        sampled = bool((n + w) % 2)
        said = f"{name}-{way}-{'sampled' if sampled else 'greedy'}"
        yield pytest.param(name, way, sampled, marks=marks, id=said)


def with_a_model(name: str) -> Callable[[], Subject]:
    def make() -> Subject:
        model = target(name)
        draft = nearly(model)
        return Subject(model, dict(assistant_model=draft), (model, draft))

    return make


@pytest.mark.parametrize(("name", "who", "sampled"), [*turns(WHO, ["both"])])
def test_a_model_drafts(
    name: str, who: str, sampled: bool, proposals: Proposals, tmp_path: Path
) -> None:
    how: dict[str, Any] = dict(do_sample=True, top_k=20) if sampled else {}
    lives = check(with_a_model(name), WHO[who], proposals, tmp_path, **how)
    rounds = list(accepted(proposals))
    assert sum(kept for kept, _ in rounds) > 0, "nothing is accepted: no test"
    cold, known = reuse(name, lives)
    assert not any(cold)
    assert all(n >= 64 for each in known for n in each), "both prompts are reused"


OWN: dict[str, dict[str, Any]] = {
    "early": dict(assistant_early_exit=2),
    "lookup": dict(prompt_lookup_num_tokens=4),
}


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call.*fewer layers")
@pytest.mark.parametrize(("name", "way", "sampled"), [*turns(OWN, OWN)])
def test_a_target_drafts_for_itself(
    name: str, way: str, sampled: bool, proposals: Proposals, tmp_path: Path
) -> None:
    def make() -> Subject:
        model = target(name)
        return Subject(model, dict(OWN[way]), (model,))

    if name in models.RECURRENT and way == "early" and models.OLD:
        pytest.skip("this release cannot crop layers that have seen no token")
    if (name, way) == ("gpt_neox", "early"):
        pytest.skip("its class cannot exit early")
    how: dict[str, Any] = dict(do_sample=True, top_k=20) if sampled else {}
    cold, known = reuse(name, check(make, (0,), proposals, tmp_path, **how))
    assert cold == [0]
    assert all(n >= 64 for each in known for n in each)


def test_the_warning_names_the_draft_that_exits_early() -> None:
    model, ids = target("llama"), models.prompt(40)
    with attached(model), pytest.warns(UserWarning, match="a draft that exits early") as warned:
        for _ in range(2):
            generate(model, 4, input_ids=ids, assistant_early_exit=2)
    assert len(warned) == 1


# ---- a draft with other tokens than its target


class Sorted(transformers.PreTrainedTokenizerFast):  # type: ignore[misc]
    """A tokenizer of single letters, whose vocabulary has one order in each run."""

    def get_vocab(self) -> dict[str, int]:
        return dict(sorted(super().get_vocab().items()))


def letters(*, turned: bool) -> Any:
    names = sorted(ByteLevel.alphabet(), reverse=turned)
    names += ["ab", "cd", "ef", "gh"] if turned else []
    inner = Tokenizer(BPE({name: i for i, name in enumerate(names)}, []))
    inner.pre_tokenizer, inner.decoder = ByteLevel(), decoders.ByteLevel()
    return Sorted(tokenizer_object=inner)


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call.*changed and cannot be served")
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_draft_with_other_tokens(sampled: bool) -> None:
    """To sample, transformers prunes the draft's head and maps the ids of its later forwards."""
    ids = models.prompt(40).repeat(1, 2)
    settings = models.GROUPED | dict(vocab_size=260, num_hidden_layers=2)

    def answers(kvs: list[Any], *, attach: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        draft: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
        draft, found = models.sharpen(draft), []
        tokenizers = dict(tokenizer=letters(turned=False), assistant_tokenizer=letters(turned=True))
        with ExitStack() as stack:
            model = models.causal("llama")
            kvs += [stack.enter_context(attached(one)) for one in (model, draft) if attach]
            for _ in range(3):
                torch.manual_seed(5)
                given = dict(input_ids=ids, assistant_model=draft, do_sample=sampled, **tokenizers)
                found.append(generate(model, NEW, **given).sequences)
                known.append([reused(kv) for kv in kvs])
        return found

    known, kvs = list[list[int]](), list[Any]()
    wanted = answers([], attach=False)
    known.clear()
    assert all(map(torch.equal, answers(kvs, attach=True), wanted))
    assert [each[0] for each in known] == [0, 79, 158]
    assert (known[-1][1] == 0) is sampled, "ids that are mapped name no page"


# ---- drafts from the target's hidden states: their prompts are computed with the target's


def few_words(name: str, **settings: Any) -> Any:
    """Return a model of few tokens, so that random drafts are accepted at times."""
    model: Any = models.causal(name)
    for setting, value in settings.items():
        setattr(model.config, setting, value)
    model.config.vocab_size = WORDS
    torch.manual_seed(0)
    return models.sharpen(type(model)(model.config))


def spread(module: Any) -> Any:
    """Draw the weights of a module anew, wide enough that its answers differ."""
    source = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=source))
    return module.eval()


def with_mtp(name: str) -> Callable[[], Subject]:
    def make() -> Subject:
        model = few_words(name, num_mtp_layers=2)
        return Subject(model, dict(use_mtp=True), (model,))

    return make


def with_dflash(name: str) -> Callable[[], Subject]:
    def make() -> Subject:
        model = few_words(name)
        config = transformers.MuseGlimmerAssistantConfig(
            **{k: v for k, v in models.GROUPED.items() if k != "vocab_size"}
            | dict(num_hidden_layers=2),
            sliding_window=24,
            block_size=4,
            mask_token_id=1,
            target_layer_ids=[0, 2],
        )
        draft = spread(transformers.MuseGlimmerAssistantModel(config))
        return Subject(model, dict(speculation_type="dflash", assistant_model=draft), (model,))

    return make


def with_gemma4() -> Subject:
    settings = dict(
        **models.GROUPED | dict(vocab_size=WORDS),
        global_head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=WORDS,
        num_kv_shared_layers=2,
        attention_k_eq_v=False,
    )
    torch.manual_seed(2)
    config = transformers.Gemma4TextConfig(**settings)
    model = models.sharpen(transformers.Gemma4ForCausalLM(config))
    own = settings | dict(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
    )
    assistant = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**own), backbone_hidden_size=64
    )
    draft: Any = models.sharpen(transformers.Gemma4AssistantForCausalLM(assistant))
    draft.generation_config.num_assistant_tokens = 3
    return Subject(model, dict(assistant_model=draft), (model,))


MTP = pytest.mark.skipif(
    not hasattr(modeling_layers, "MtpModel"), reason="transformers drafts with no MTP layers"
)
DFLASH = pytest.mark.skipif(
    not hasattr(transformers, "MuseGlimmerAssistantModel"), reason="no model for DFlash"
)


@pytest.fixture
def mtp_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw MTP layers, which are read from the files of the target's checkpoint, at random."""
    if hasattr(modeling_layers, "MtpModel"):

        def drawn(cls: Any, main_model: Any, /, **given: Any) -> Any:
            made = cls(main_model, main_model.config.num_mtp_layers)
            spread(made.layers)
            return made.eval()

        monkeypatch.setattr(modeling_layers.MtpModel, "from_pretrained", classmethod(drawn))


@pytest.mark.filterwarnings(HIDDEN)
@pytest.mark.usefixtures("mtp_layers")
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(with_mtp("llama"), marks=MTP, id="mtp-llama"),
        pytest.param(with_mtp("deepseek_v3"), marks=[MTP, thorough], id="mtp-deepseek_v3"),
        pytest.param(with_dflash("llama"), marks=DFLASH, id="dflash-llama"),
        pytest.param(with_dflash("gemma3"), marks=[DFLASH, thorough], id="dflash-gemma3"),
        pytest.param(with_gemma4, marks=thorough, id="gemma4"),
    ],
)
def test_hidden_states_draft(
    make: Callable[[], Subject], sampled: bool, proposals: Proposals, tmp_path: Path
) -> None:
    if make is with_gemma4:
        try:
            make()
        except (AttributeError, ValueError) as error:
            pytest.skip(f"transformers cannot build such a draft ({error})")
    how: dict[str, Any] = dict(do_sample=True) if sampled else {}
    lives = check(make, (0,), proposals, tmp_path, words=WORDS, **how)
    assert not sampled or sum(kept for kept, _ in accepted(proposals)) > 0
    assert not any(n for life in lives for each in life for n in each), "computed together"


@MTP
@pytest.mark.filterwarnings(HIDDEN)
@pytest.mark.usefixtures("mtp_layers")
def test_pages_of_a_drafted_prompt_serve_plain_calls() -> None:
    model, how, _ = with_mtp("llama")()
    ids = models.prompt(70) % WORDS
    given = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    want = generate(model, NEW, **given)
    with attached(model) as kv:
        generate(model, NEW, **given, **how)
        assert reused(kv) == 0
        assert torch.equal(generate(model, NEW, **given).sequences, want.sequences)
        assert reused(kv) == 69
