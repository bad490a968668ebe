"""Images: salts that tell them apart, and what is left of them behind a known prefix."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutputWithPooling

from tests.inside import Fill, placeholder_ids, usual

IDS = {"image_token_id": 99, "audio_token_id": 98}


def tokens(*ids: int) -> Any:
    return np.array(ids, np.uint32)


def images(*seeds: int) -> torch.Tensor:
    made = [torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(s)) for s in seeds]
    return torch.stack(made)


def test_one_image_a_run_salts_its_own_run() -> None:
    row = tokens(1, 99, 99, 2, 99, 99, 3)
    one = Fill([row], {"pixel_values": images(1, 2)}, IDS)
    two = Fill([row], {"pixel_values": images(1, 3)}, IDS)
    assert one.exact
    assert [salt.position for salt in one.salts(0)] == [1, 4]
    assert one.salts(0)[0] == two.salts(0)[0], "a second image does not change the first"
    assert one.salts(0)[1] != two.salts(0)[1]


def test_a_prefix_is_cut_between_images_only() -> None:
    fill = Fill([tokens(1, 99, 99, 2, 99, 99, 3)], {"pixel_values": images(1, 2)}, IDS)
    assert [fill.cut(base, [0]) for base in range(8)] == [0, 1, 1, 3, 4, 4, 6, 7]
    assert [fill.cut(base, [2]) for base in (3, 4, 5)] == [3, 3, 5]
    assert torch.equal(fill.rest(3, [0])["pixel_values"], images(2))
    assert fill.rest(6, [0]) == {}
    assert torch.equal(fill.rest(0, [0])["pixel_values"], images(1, 2))


@given(
    rows=st.lists(st.lists(st.sampled_from([1, 2, 99]), min_size=1, max_size=30), min_size=1),
    base=st.integers(0, 40),
    page=st.integers(1, 8),
    exact=st.booleans(),
)
def test_the_last_page_end_that_cuts_no_image(
    rows: list[list[int]], base: int, page: int, *, exact: bool
) -> None:
    prompts = [tokens(*row) for row in rows]
    table = torch.zeros(sum(row.count(99) for row in rows) if exact else 1000, 2)
    encoded = {"image": BaseModelOutputWithPooling(pooler_output=[table])}
    fill = Fill(prompts, {"mm_encoder_outputs": encoded}, IDS)
    ends = [end for end in range(0, base + 1, page) if fill.cut(end, [0] * len(rows)) == end]
    assert fill.cut_at_page(base, page) == max(ends)


@given(
    low=st.integers(20, 40),
    shift=st.integers(-9, 9),
    pad=st.integers(0, 5),
    wrong=st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from([-1, 0, 1])),
)
def test_positions_in_four_dimensions_are_the_usual_ones(
    low: int, shift: int, pad: int, wrong: tuple[int, int, int]
) -> None:
    """The first counts the row's tokens, the others have its shift."""
    count = np.arange(low, low + 3) - pad
    told = np.stack([count, *[count + shift] * 3])[:, None]
    told[wrong[0], 0, wrong[1]] += wrong[2]
    assert usual(low, 3, told, np.array([pad]), np.array([shift])) == (wrong[2] == 0)


def test_runs_of_different_lengths_are_used_whole_or_not_at_all() -> None:
    row = tokens(1, 99, 99, 2, 99, 3)
    one, two = (Fill([row], {"pixel_values": images(1, n)}, IDS) for n in (2, 3))
    assert not one.exact
    assert [salt.position for salt in one.salts(0)] == [1]
    assert one.salts(0) != two.salts(0)
    assert [one.cut(base, [0]) for base in (1, 3, 5, 6)] == [1, 1, 5, 6]
    assert one.rest(5, [0]) == {}


def test_images_by_row_are_used_whole_or_not_at_all() -> None:
    both, none = images(1, 2), torch.zeros(2, 3, 4, 4)  # of a row without images, which is padding
    rows = [tokens(1, 99, 99, 2, 99, 99, 3), tokens(1, 2, 3, 4, 5, 6, 7)]
    fill = Fill(rows, {"pixel_values": torch.stack([both, none])}, IDS)
    assert not fill.exact
    assert [fill.cut(base, [0, 0]) for base in (1, 4, 7)] == [0, 0, 0]


def test_rows_share_what_is_theirs_alone() -> None:
    row = tokens(99, 99, 1)
    batch = Fill([row, row], {"pixel_values": images(1, 2)}, IDS)
    alone = Fill([row], {"pixel_values": images(2)}, IDS)
    assert batch.salts(1) == alone.salts(0)
    assert batch.salts(0) != batch.salts(1)


def test_features_fill_placeholders_in_order() -> None:
    row = tokens(1, 99, 99, 99, 2, 99, 3)
    features = torch.arange(8.0).view(4, 2)

    def encoded(table: torch.Tensor) -> dict[str, Any]:
        return {"image": BaseModelOutputWithPooling(pooler_output=[table[:3], table[3:]])}

    fill = Fill([row], {"mm_encoder_outputs": encoded(features)}, IDS)
    other = features.clone()
    other[3] = 9
    changed = Fill([row], {"mm_encoder_outputs": encoded(other)}, IDS)
    assert fill.exact
    assert fill.salts(0)[0] == changed.salts(0)[0]
    assert fill.salts(0)[1] != changed.salts(0)[1]
    left = fill.rest(4, [0])["mm_encoder_outputs"]["image"].pooler_output
    assert torch.equal(torch.cat(left), features[3:])
    short = {"image": BaseModelOutputWithPooling(pooler_output=[features[:2]])}
    assert not Fill([row], {"mm_encoder_outputs": short}, IDS).exact


def test_placeholders_by_name() -> None:
    class Config:
        def __init__(self) -> None:
            self.image_token_index, self.audio_token_id, self.eos_token_id = 7, 8, 2
            self.vision_start_token_id, self.video_token_id = 3, None

    assert set(placeholder_ids(Config()).values()) == {7, 8}
