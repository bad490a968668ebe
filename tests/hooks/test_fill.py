"""Images: salts that tell them apart, and what is left of them behind a known prefix."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from tests.inside import Fill, placeholder_ids

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


def test_runs_of_different_lengths_are_used_whole_or_not_at_all() -> None:
    row = tokens(1, 99, 99, 2, 99, 3)
    one, two = (Fill([row], {"pixel_values": images(1, n)}, IDS) for n in (2, 3))
    assert not one.exact
    assert [salt.position for salt in one.salts(0)] == [1]
    assert one.salts(0) != two.salts(0)
    assert [one.cut(base, [0]) for base in (1, 3, 5, 6)] == [1, 1, 5, 6]
    assert one.rest(5, [0]) == {}


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
