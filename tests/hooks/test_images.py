"""Image-text models: text alone, and images whose positions have several dimensions (M-RoPE)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused
from tests.hooks.matrix import build

IMAGE, START, END = 190, 192, 193
_ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
_TEXT = models.GROUPED | dict(num_hidden_layers=3, rope_parameters=_ROPE)
_TOKENS = dict(
    image_token_id=IMAGE, video_token_id=191, vision_start_token_id=START, vision_end_token_id=END
)
_SIGHT = dict(depth=2, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)


_WIDE = _SIGHT | dict(hidden_size=32, intermediate_size=48, out_hidden_size=64)
_MIXED = _ROPE | dict(mrope_interleaved=True)
M_ROPE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VL",
        _TEXT,
        _SIGHT | dict(embed_dim=32, hidden_size=64, mlp_ratio=2, in_channels=3),
    ),
    "qwen2_5_vl": ("Qwen2_5_VL", _TEXT, _WIDE | dict(window_size=16, fullatt_block_indexes=[1])),
    "qwen3_vl": (
        "Qwen3VL",
        _TEXT | dict(rope_parameters=_MIXED),
        _WIDE | dict(num_position_embeddings=64, deepstack_visual_indexes=[0, 1]),
    ),
}
"""Prefixes of classes, and what texts and images are read with; `HYBRID` has recurrent layers."""
HYBRID = {
    "qwen3_5": (
        "Qwen3_5",
        models.GROUPED
        | models.LINEAR
        | dict(rope_parameters=_MIXED | dict(partial_rotary_factor=1.0)),
        _WIDE | dict(num_position_embeddings=64),
    )
}
SPECIAL = [IMAGE, 191, START, END]


def made(name: str) -> Any:
    kind, words, sight = (M_ROPE | HYBRID)[name]
    config = getattr(transformers, f"{kind}Config")
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(
        config(text_config=words, vision_config=sight, **_TOKENS)
    )
    return models.sharpen(model, factor=2.0)


def text(count: int, seed: int) -> torch.Tensor:
    return torch.randint(5, 180, (1, count), generator=torch.Generator().manual_seed(seed))


class Image:
    """A picture of `rows x columns` patches, by seed."""

    def __init__(self, rows: int, columns: int, seed: int) -> None:
        seeded = torch.Generator().manual_seed(seed)
        self.grid = torch.tensor([[1, rows, columns]])
        self.pixels = 3 * torch.randn(rows * columns, 96, generator=seeded)
        self.ids = torch.tensor([[START, *[IMAGE] * (rows * columns // 4), END]])


def asked(*parts: torch.Tensor | Image) -> dict[str, torch.Tensor]:
    """What `generate` is given for texts and images one after the other."""
    images = [part for part in parts if isinstance(part, Image)]
    ids = torch.cat([part.ids if isinstance(part, Image) else part for part in parts], 1)
    given = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    if images:
        given |= dict(
            pixel_values=torch.cat([image.pixels for image in images]),
            image_grid_thw=torch.cat([image.grid for image in images]),
            mm_token_type_ids=(ids == IMAGE).long(),
        )
    return given


CAT, DOG, WIDE = Image(8, 8, seed=1), Image(8, 8, seed=2), Image(4, 12, seed=3)


@pytest.mark.parametrize("name", M_ROPE)
def test_positions_in_several_dimensions(name: str, tmp_path: Path) -> None:
    model, twin, other = made(name), made(name), made(name)
    before, behind = text(30, 1), text(20, 2)
    talks = [
        asked(before, CAT, behind),
        asked(before, WIDE, behind),  # another end of its positions
        asked(before, DOG, behind),
        asked(torch.cat([before, text(24, 3)], 1)),
        asked(before, CAT, behind, DOG, behind),
        asked(before, WIDE, CAT, text(3, 4)),
        asked(before, CAT),
    ]
    wanted = [generate(twin, 5, **given) for given in talks]
    assert not torch.equal(wanted[0].logits[0], wanted[2].logits[0])
    second = asked(before, CAT, torch.cat([behind, wanted[0].sequences[:, -5:], text(9, 5)], 1))
    talks, wanted = [*talks, second], [*wanted, generate(twin, 5, **second)]
    for served in (model, other):  # the second from a disk
        with attached(served, disk=f"{tmp_path}/kv:64MiB") as kv:
            for again in range(2):
                for given, want in zip(talks, wanted, strict=True):
                    known = reused(kv)
                    assert_same(generate(served, 5, **given), want, 1e-4)
                    if again and given["input_ids"][0, -1] != END:
                        length = given["input_ids"].shape[1]
                        assert reused(kv) - known >= length - 16, "of any other prompt meanwhile"
    last = talks[0] | dict(num_beams=3)
    want = generate(twin, 4, **last).sequences
    with attached(model) as kv:
        for _ in range(2):
            assert torch.equal(generate(model, 4, **last).sequences, want)
        assert reused(kv) > 0


@pytest.mark.parametrize("name", [*M_ROPE, *HYBRID])
def test_an_answer_about_an_image_is_reused(name: str) -> None:
    """Its positions lag behind its tokens in three dimensions of four."""
    model, twin, spoken = made(name), made(name), dict(suppress_tokens=SPECIAL)
    talk, least = [text(30, 1), CAT, text(20, 2)], 0
    with attached(model) as kv:
        for turn in range(3):
            given, known = asked(*talk), reused(kv)
            want = generate(twin, 40, **given, **spoken)
            assert_same(generate(model, 40, **given, **spoken), want, 1e-4)
            assert reused(kv) - known >= least, "the answer's pages as well"
            length = given["input_ids"].shape[1]
            least = 0 if models.OLD else length + 40 - 16  # there, less is reused
            talk += [want.sequences[:, length:], text(9, 3 + turn), DOG, text(5, 6 + turn)]


@pytest.mark.usefixtures("all_is_loaded")
@pytest.mark.parametrize("length", [30, pytest.param(303, marks=pytest.mark.thorough)])
def test_states_are_saved_as_often_with_images_as_without(length: int, tmp_path: Path) -> None:
    """Prompts with an image reuse what those with text in its place do, also from a disk."""
    model, twin = made("qwen3_5"), made("qwen3_5")
    before, behind, answer = text(length, 1), text(length - 10, 2), text(14, 3)
    counts = []
    for place, (cat, dog) in {"image": (CAT, DOG), "text": (text(18, 8), text(18, 9))}.items():
        talks = [asked(before, cat, torch.cat([behind, text(40, n)], 1)) for n in (4, 5, 6)]
        talks += [asked(before, cat, behind), asked(before, cat, torch.cat([behind, answer], 1))]
        talks += [asked(before, cat, behind, dog, text(20, n)) for n in (4, 5, 6)]
        talks.append(asked(before, cat, behind, dog, cat, dog, behind))
        counts.append([])
        for _ in range(2):
            with attached(model, disk=f"{tmp_path}/{place}:64MiB") as kv:
                for given in talks:
                    known, want = reused(kv), generate(twin, 3, **given)
                    assert_same(generate(model, 3, **given), want, 1e-4)
                    counts[-1].append(reused(kv) - known)
    if not models.OLD:  # there, less is reused behind an image
        assert counts[0] == counts[1] and min(counts[0][9:]) > 0


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_a_padded_pair_of_images(name: str) -> None:
    model, twin = made(name), made(name)
    first, second = asked(text(30, 1), CAT, text(20, 2)), asked(text(13, 3), WIDE, text(9, 4))
    pad = first["input_ids"].shape[1] - second["input_ids"].shape[1]
    given = {
        key: torch.cat([first[key], torch.nn.functional.pad(second[key], (pad, 0))])
        for key in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    for key in ("pixel_values", "image_grid_thw"):
        given[key] = torch.cat([first[key], second[key]])
    want = generate(twin, 5, **given)
    with attached(model) as kv:
        for _ in range(2):
            assert_same(generate(model, 5, **given), want, 1e-4)
        assert_same(generate(model, 5, **first), generate(twin, 5, **first), 1e-4)
        assert reused(kv) > 0


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call")
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_forwards_without_positions_count_anew(name: str) -> None:
    """Behind a cache, such a model counts from where its last prompt with images ended."""
    model, twin = made(name), made(name)
    calls = [
        *(asked(text(40, 1)), asked(text(20, 2), CAT, text(9, 3))),
        *(asked(torch.cat([text(40, 1), text(7, 4)], 1)), asked(text(20, 2), WIDE, text(9, 3))),
        *(asked(text(20, 2), CAT, text(9, 3)), asked(torch.cat([text(40, 1), text(7, 4)], 1))),
    ]
    wanted = [passed(twin, given) for given in calls]
    with attached(model) as kv:
        for given, want in zip(calls, wanted, strict=True):
            torch.testing.assert_close(passed(model, given), want, rtol=0, atol=1e-3)
        assert reused(kv) > 0


# ---- types of tokens that let them see later ones (Gemma 3), or whose zero is a token (GPT-2)


def _gemma3() -> Any:
    sight = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    sight |= dict(image_size=28, patch_size=14)
    config = transformers.Gemma3Config(
        text_config=models.GROUPED | dict(sliding_window=24, query_pre_attn_scalar=16),
        vision_config=sight,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _hrm() -> Any:
    sizes = {k: v for k, v in models.GROUPED.items() if k != "num_hidden_layers"}
    config = transformers.HrmTextConfig(**sizes, num_layers_per_stack=1, prefix_lm=True)
    return transformers.HrmTextForCausalLM(config)


def _gpt2() -> Any:
    sizes = dict(n_embd=64, n_layer=2, n_head=4, vocab_size=256)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


TYPED = {"gemma3": _gemma3, "gpt2": _gpt2} | (
    {"hrm": _hrm} if hasattr(transformers, "HrmTextConfig") else {}
)


@pytest.mark.parametrize("name", TYPED)
@pytest.mark.filterwarnings("ignore:FlowKV leaves this call.*(one type see later|same as none)")
def test_types_of_tokens(name: str) -> None:
    torch.manual_seed(3)
    model = models.sharpen(TYPED[name](), factor=5.0 if name == "hrm" else 2.0)
    ids = torch.cat([text(40, 1), text(20, 2)], 1)
    other = torch.cat([text(40, 1), text(24, 3)], 1)
    calls = [dict(input_ids=x, token_type_ids=torch.ones_like(x)) for x in (ids, other)]
    calls += [dict(input_ids=x, token_type_ids=torch.zeros_like(x)) for x in (ids, other)]
    calls += [dict(input_ids=ids), dict(input_ids=other)]
    calls += [dict(input_ids=ids, token_type_ids=(torch.arange(60) < 50).long()[None])]
    wanted = [generate(model, 4, **call) for call in calls]
    with attached(model) as kv:
        for _ in range(2):
            for call, theirs in zip(calls, wanted, strict=True):
                assert_same(generate(model, 4, **call), theirs)
        assert reused(kv) > 0, "those without types are shared"


@torch.no_grad()
def test_types_given_behind_a_prompt_without() -> None:
    torch.manual_seed(3)
    model, known = models.sharpen(_gpt2()), torch.cat([text(40, 1), text(20, 2), text(3, 3)], 1)
    theirs = generate(model, 4, input_ids=known)
    with attached(model) as kv:
        cache, types = DynamicCache(config=model.config), torch.zeros(1, 20, dtype=torch.long)
        model(known[:, :40], past_key_values=cache, logits_to_keep=1)
        model(known[:, 40:60], past_key_values=cache, token_type_ids=types)
        assert_same(generate(model, 4, input_ids=known), theirs)
        assert reused(kv) == 32


def test_a_cache_with_tokens_says_so() -> None:
    """Molmo 2 and PaliGemma read there whether a forward is the first."""
    model, ids = models.short(), models.prompt(20)
    wanted = generate(model, 2, input_ids=ids).past_key_values
    with attached(model):
        found = generate(model, 2, input_ids=ids).past_key_values
        assert found.is_initialized == wanted.is_initialized


@pytest.mark.skipif(not hasattr(transformers, "HiggsAudioV2Config"), reason="an older release")
@torch.no_grad()
def test_inputs_of_unknown_names_may_fill_tokens() -> None:
    """Codes of audio fill placeholders in order: behind a known prefix, others are the first."""
    marks = dict(audio_token_id=IMAGE, audio_delay_token_id=191, audio_bos_token_id=START)
    config: Any = transformers.HiggsAudioV2Config(
        **models.GROUPED, **marks, num_codebooks=2, codebook_size=64
    )
    model: Any = models.sharpen(transformers.HiggsAudioV2ForConditionalGeneration(config))
    audio, codes = torch.full((1, 20), IMAGE), models.prompt(40, 8).remainder(64)
    filled = dict(
        audio_input_ids=codes[..., None].expand(-1, -1, 2),
        audio_input_ids_mask=torch.ones(1, 40, dtype=torch.bool),
        logits_to_keep=1,
    )

    def ask(middle: int) -> torch.Tensor:
        ids = torch.cat([text(20, 1), audio, text(12, middle), audio, text(9, 2)], 1)
        cache = DynamicCache(config=config)
        return model(ids, past_key_values=cache, **filled).logits

    wanted = [ask(3), ask(4)]
    with attached(model) as kv:
        for middle, theirs in ((3, wanted[0]), (4, wanted[1]), (4, wanted[1])):
            assert torch.allclose(ask(middle), theirs, atol=1e-3)
        assert reused(kv) > 0
        ids = torch.cat([text(20, 1), audio, text(12, 3), audio, text(9, 2)], 1)
        given = dict(input_ids=ids, **filled) | dict(attention_mask=torch.ones_like(ids))
        theirs = generate(model, 3, **given).logits
        ours = generate(model, 3, **given, past_key_values=kv.cache(**given)).logits
        assert torch.allclose(torch.stack(ours), torch.stack(theirs), atol=1e-3)


# ---- what an image changes beside its own tokens


def same_as_alone(model: Any, calls: list[dict[str, Any]], **options: Any) -> list[int]:
    """Ask for all calls twice, and compare with the model alone; return what each time reused."""
    wanted, found = [generate(model, 4, **call) for call in calls], []
    with attached(model, **options) as kv:
        for _ in range(2):
            before = reused(kv)
            for call, theirs in zip(calls, wanted, strict=True):
                assert_same(generate(model, 4, **call), theirs, 1e-3)
            found.append(reused(kv) - before)
    return found


def pictured(*parts: torch.Tensor | int, typed: int = 0, token: int = IMAGE) -> dict[str, Any]:
    """What `generate` is given for texts and square images, whose seeds are given.

    Args:
        parts: Texts, and seeds of images of `models.IMAGE_PATCHES` tokens.
        typed: How many tokens behind an image are of its type.
        token: The placeholder.
    """
    patches = torch.full((1, models.IMAGE_PATCHES), token)
    ids = torch.cat([patches if isinstance(part, int) else part for part in parts], 1)
    noise = [torch.Generator().manual_seed(part) for part in parts if isinstance(part, int)]
    given = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    given["pixel_values"] = torch.stack([3 * torch.randn(3, 28, 28, generator=g) for g in noise])
    types = (ids == token).long()
    for _ in range(typed):
        types[:, 1:] = types[:, 1:] | types[:, :-1]
    return given | dict(token_type_ids=types)


def test_two_images_never_share_a_page() -> None:
    """Placeholders are the same tokens for every image: only the pixels tell prompts apart."""
    model, first, last = models.llava(), text(20, 1), text(36, 2)
    longer = torch.cat([last, text(12, 5)], 1)
    calls = [untyped(first, n, end) for n, end in ((1, last), (2, last), (1, longer))]
    calls.append(dict(input_ids=text(60, 1)))
    images = [generate(model, 4, **call).logits[0] for call in calls[:2]]
    assert not torch.equal(*images), "images do not matter: no test"
    counts = same_as_alone(model, calls)
    assert counts[0] == 16 + 60 + 16, "before the image; all of the shorter prompt; before it"
    assert counts[1] == 59 + 59 + 71 + 59


def untyped(*parts: torch.Tensor | int) -> dict[str, Any]:
    """What `generate` of LLaVA is given, see `pictured`."""
    given = pictured(*parts, token=models.IMAGE_TOKEN)
    del given["token_type_ids"]
    return given


def _seeing() -> Any:
    torch.manual_seed(3)
    model = models.sharpen(_gemma3(), factor=2.0)
    weight = model.model.multi_modal_projector.mm_input_projection_weight
    torch.nn.init.normal_(weight)  # zeros, without a checkpoint
    return model


def test_an_image_behind_a_known_prefix_sees_itself_whole() -> None:
    """Gemma 3 reads its mask from the types of all tokens, not of those left to compute."""
    first, last = text(30, 1), text(20, 2)
    calls = [
        *(pictured(first, 1, last), pictured(first, 2, last)),
        *(pictured(first, 1, last, 2, text(5, 3)), pictured(first, 1, last, 3, text(5, 3))),
        pictured(first, 1, 2, last),
    ]
    model = _seeing()
    counts = same_as_alone(model, calls, page_size=8)
    assert counts[1] > counts[0] > 0
    given = {key: value for key, value in calls[2].items() if key != "attention_mask"}
    wanted = generate(model, 4, **given)
    with attached(model, page_size=8) as kv:
        for call in (calls[0], given):
            found = generate(model, 4, **call, past_key_values=kv.cache(**call))
        assert_same(found, wanted)
        assert reused(kv) > 30 or not hasattr(model, "_supports_mm_encoder_outputs")


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call.*one type see later ones")
def test_text_of_the_type_of_an_image_is_not_shared() -> None:
    """The image sees it, though it lies in later pages."""
    calls = [pictured(text(30, 1), 1, text(9, 2), text(20, seed), typed=20) for seed in (3, 4)]
    assert same_as_alone(_seeing(), calls, page_size=8) == [0, 0]


@pytest.mark.skipif(not hasattr(transformers, "Ovis2Config"), reason="an older release")
def test_tokens_that_images_change_beside_their_own() -> None:
    """Ovis 2 embeds the marks around images otherwise than without one."""
    model = build("image", "ovis2")
    marks = model.config.visual_indicator_token_ids = (200, 201)
    model.model.visual_indicator_token_ids = marks
    start, end = torch.tensor([[200]]), torch.tensor([[201]])
    image = torch.full((1, 16), model.config.image_token_id)
    pixels = torch.randn(2, 1, 3, 56, 56, generator=torch.Generator().manual_seed(1))
    before, behind = torch.cat([text(30, 1), start], 1), torch.cat([end, text(20, 2)], 1)
    ids = [
        torch.cat([before, image, behind], 1),
        torch.cat([before, image, end, behind], 1),
        torch.cat([before, image, behind, start, image, behind], 1),
        torch.cat([before, text(20, 1), image, behind], 1),
    ]
    calls = [dict(input_ids=ids[n], pixel_values=pixels[0]) for n in (0, 1, 3)]
    calls += [dict(input_ids=ids[2], pixel_values=pixels.flatten(0, 1)), dict(input_ids=ids[3])]
    assert same_as_alone(model, calls, page_size=8)[1] > 0


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call.*padding holds images")
def test_an_image_in_the_padding_takes_its_features() -> None:
    model: Any = models.llava()
    calls = [untyped(1, text(44, 1), n, text(9, 2)) for n in (2, 3)]
    for call in calls:
        call["attention_mask"][:, :20] = 0
    assert same_as_alone(model, calls, page_size=8) == [0, 0]


def test_a_placeholder_that_is_chosen_later() -> None:
    model: Any = models.llava()
    old, new = torch.tensor([[models.IMAGE_TOKEN]]), 201
    calls = [pictured(text(20, 1), n, text(9, 2), old, text(9, 3), token=new) for n in (1, 2)]
    for call in calls:
        del call["token_type_ids"]
    with attached(model, page_size=8) as kv:
        generate(model, 1, input_ids=text(20, 1))
        model.config.image_token_id = new
        found = [generate(model, 4, **call) for call in calls]
        assert reused(kv) >= 16
    for call, ours in zip(calls, found, strict=True):
        assert_same(ours, generate(model, 4, **call))


@torch.no_grad()
def passed(model: Any, given: dict[str, Any], kv: Any = None) -> torch.Tensor:
    """The last logits of a prompt that is passed whole, to a cache made for it if a KV is given."""
    made = {key: value for key, value in given.items() if key != "position_ids"}
    cache = DynamicCache(config=model.config.get_text_config()) if kv is None else kv.cache(**made)
    return model(**given, past_key_values=cache, logits_to_keep=1).logits[:, -1]


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call.*images and no position_ids")
def test_a_cache_made_beforehand_does_not_know_positions_of_images() -> None:
    """`generate` and the model make them in several dimensions, and a loop gives any others."""
    model, given = made("qwen3_vl"), asked(text(30, 1), CAT, text(20, 2))
    flat = given | dict(position_ids=torch.arange(given["input_ids"].shape[1]).repeat(3, 1, 1))
    wanted = [passed(model, call) for call in (given, flat)]
    answer = generate(model, 3, **given)
    with attached(model, page_size=8) as kv:
        for _ in range(2):
            for call, theirs in zip((given, flat), wanted, strict=True):
                for way in (None, kv):
                    assert torch.allclose(passed(model, call, way), theirs, atol=1e-3)
            found = generate(model, 3, **given, past_key_values=kv.cache(**given))
            assert_same(found, answer, 1e-3)
        assert reused(kv) > 0


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen3_vl"])
def test_a_cache_made_beforehand_is_given_to_generate_with_another_image(name: str) -> None:
    """`generate` encodes its images before the forward that shows them."""
    first, last = text(30, 1), text(20, 2)
    if name == "qwen3_vl":
        model, calls = made(name), [asked(first, image, last) for image in (CAT, DOG)]
    else:
        model, given = (models.llava(), untyped) if name == "llava" else (_seeing(), pictured)
        calls = [given(first, n, last) for n in (1, 2)]
    wanted = [generate(model, 4, **call) for call in calls]
    with attached(model, page_size=8) as kv:
        for cached, given in [(0, 1), (0, 0), (1, 1), (1, 0)] * 2:
            cache = kv.cache(**calls[cached])
            assert_same(generate(model, 4, **calls[given], past_key_values=cache), wanted[given])
            assert_same(generate(model, 4, **calls[cached]), wanted[cached])
        cache = kv.cache(input_ids=calls[0]["input_ids"])
        assert_same(generate(model, 4, **calls[1], past_key_values=cache), wanted[1])
        assert cache.reused >= 48 or models.OLD, "what plain `generate` reuses"


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_text_over_a_cache_made_beforehand_behind_an_image(name: str) -> None:
    """Behind tokens of a cache, `generate` counts on from the prompt that it ran last."""
    model, plain = made(name), asked(text(40, 1))
    pair = {key: value.repeat(2, 1) for key, value in asked(text(30, 1), WIDE, text(9, 3)).items()}
    wanted = generate(model, 4, **plain)
    with attached(model, page_size=8) as kv:
        for _ in range(2):
            for places in ({}, dict(position_ids=torch.arange(40).repeat(3, 1, 1))):
                generate(model, 1, **pair)
                cache = kv.cache(**plain, **places)
                assert_same(generate(model, 4, **plain, past_key_values=cache), wanted)
        assert cache.reused


def test_a_cache_made_beforehand_is_given_another_image() -> None:
    model: Any = models.llava()
    calls = [untyped(text(30, 1), n, text(9, 2)) for n in (1, 2)]
    for call in calls:
        del call["attention_mask"]
        call["position_ids"] = torch.arange(call["input_ids"].shape[1])[None]
    wanted = [passed(model, call) for call in calls]
    with attached(model, page_size=8) as kv:
        for _ in range(2):
            cache = kv.cache(**calls[0])
            with torch.no_grad():
                ours = model(**calls[1], past_key_values=cache, logits_to_keep=1).logits[:, -1]
            assert torch.allclose(ours, wanted[1], atol=1e-3)
            for call, theirs in zip(calls, wanted, strict=True):
                assert torch.allclose(passed(model, call), theirs, atol=1e-3)
        assert reused(kv) > 0


@pytest.mark.parametrize("left_out", ["pixel_values", "token_type_ids"])
def test_a_cache_made_beforehand_is_not_given_all(left_out: str) -> None:
    """Its names are those of pages with images and types, which these are not."""
    seeing: Any = models.llava() if left_out == "pixel_values" else _seeing()
    call = (untyped if left_out == "pixel_values" else pictured)(text(30, 1), 1, text(9, 2))
    less = {key: value for key, value in call.items() if key != left_out}
    wanted = [passed(seeing, given) for given in (call, less)]
    with attached(seeing, page_size=8) as kv:
        for made_for, given, n in [(call, less, 1), (less, call, 0)] * 2:
            cache = kv.cache(**made_for)
            with torch.no_grad():
                ours = seeing(**given, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            assert torch.allclose(ours, wanted[n], atol=1e-3)
            assert torch.allclose(passed(seeing, call), wanted[0], atol=1e-3)
        assert reused(kv) > 0


@torch.no_grad()
def test_positions_that_leave_some_out() -> None:
    """They may be larger than there are tokens, as those of a slow video."""
    vision = made("qwen3_vl")
    ids, places = text(40, 1), torch.arange(40).repeat(3, 1, 1)
    places[..., 20:] += 9
    given = dict(input_ids=ids, position_ids=places)
    theirs = passed(vision, given)
    with attached(vision, page_size=8) as kv:
        passed(vision, given)
        ours = vision(**given, past_key_values=kv.cache(**given), logits_to_keep=1).logits[:, -1]
        assert torch.allclose(ours, theirs, atol=1e-3) and reused(kv)


@torch.no_grad()
def test_positions_between_whole_numbers() -> None:
    """Frames of a video may have such: pages are of exactly these positions."""
    model = made("qwen3_vl")
    ids, given = text(40, 1), dict(logits_to_keep=1)

    def ask(shift: float) -> torch.Tensor:
        places = torch.arange(40.0).repeat(3, 1, 1)
        places[..., 8:] += shift
        cache = DynamicCache(config=model.config.get_text_config())
        return model(ids, position_ids=places, past_key_values=cache, **given).logits

    shifts = (0.25, 0.5, 0.25, 1.0)
    wanted = [ask(shift) for shift in shifts]
    with attached(model, page_size=8) as kv:
        for shift, theirs in zip(shifts, wanted, strict=True):
            assert torch.allclose(ask(shift), theirs, atol=1e-4)
        assert reused(kv) > 0


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call")
@pytest.mark.parametrize("pool", ["64MiB", "200KiB"])
@torch.no_grad()
def test_images_in_doubt_are_computed_with_all_of_their_batch(pool: str, tmp_path: Path) -> None:
    """Two adjacent images of a row: which content is whose is not known for a span of one row."""
    model: Any = models.llava()
    images = torch.full((1, 2 * models.IMAGE_PATCHES), models.IMAGE_TOKEN)
    rows = [torch.cat([text(20, 1), images, text(150, seed)], 1) for seed in (2, 3)]
    pixels = torch.randn(2, 2, 3, 28, 28, generator=torch.Generator().manual_seed(1))

    def ask(*order: int) -> torch.Tensor:
        ids = torch.cat([rows[i] for i in order])
        places = torch.arange(ids.shape[1])[None].expand(len(ids), -1)
        given = dict(position_ids=places, pixel_values=torch.cat([pixels[i] for i in order]))
        cache = DynamicCache(config=model.config)
        return model(ids, past_key_values=cache, logits_to_keep=1, **given).logits

    orders = [(0,), (1,), (0, 1), (1, 0)]
    wanted = [ask(*order) for order in orders]
    for _ in range(2):  # the second time from a disk
        options = dict(overflow=True) if pool == "200KiB" else {}
        with attached(model, gpu=pool, disk=f"{tmp_path}/kv:64MiB", **options) as kv:
            for order, theirs in zip(orders, wanted, strict=True):
                assert torch.allclose(ask(*order), theirs, atol=1e-3)
    assert reused(kv) > 0
