"""What the plugin hangs on models leaves them named, so that other projects' tests reuse pages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.foreign.flowkv_foreign import FEW, LONGER, lengthen_tester, without_gaps

STORY = """
import json, sys, torch
import flowkv_foreign

attached = flowkv_foreign.Attached(warm=True)
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
made = LlamaForCausalLM(config).eval()
made.save_pretrained(sys.argv[1])
for model in (made, LlamaForCausalLM.from_pretrained(sys.argv[1]).eval()):
    model.generate(torch.arange(3, 43)[None], max_new_tokens=3, do_sample=False)
print(json.dumps(attached.counted()))
"""


@pytest.mark.thorough
def test_models_that_are_made_or_loaded_are_known_and_their_pages_reused(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STORY, str(tmp_path)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    counts = json.loads(said.stdout.splitlines()[-1])
    assert (counts.get("served known"), counts.get("served foreign", 0)) == (2, 0)
    assert counts["tokens reused"] >= 2 * 32


def test_no_token_of_a_prompt_is_masked_and_other_inputs_stay() -> None:
    words, whole = torch.ones(2, 8, dtype=torch.long), torch.ones(2, 1, 8, 8)
    given = {"input_ids": words, "attention_mask": words.tril(), "pixel_values": whole}
    shown = without_gaps(given)
    assert bool(shown["attention_mask"].all()) and not bool(given["attention_mask"].all())
    assert shown["input_ids"] is words and shown["pixel_values"] is whole
    assert without_gaps({"input_ids": words, "attention_mask": whole})["attention_mask"] is whole
    assert without_gaps({"inputs_embeds": whole}) == {"inputs_embeds": whole}


def test_inputs_are_longer_where_their_length_was_not_chosen() -> None:
    class Tester:
        def __init__(self, parent: object, seq_length: int = FEW) -> None:
            self.seq_length = seq_length

    class Chosen(Tester):
        def __init__(self, parent: object, seq_length: int = 5) -> None:
            super().__init__(parent, seq_length)

    class Named:
        def __init__(self, parent: object, **options: int) -> None:
            self.seq_length = options.get("seq_length", FEW)

    class Inherits(Named):
        def __init__(self, parent: object, **options: int) -> None:
            super().__init__(parent, **options)
            self.derived = self.seq_length + 1

    for tester in (Tester, Chosen, Tester, Named, Inherits):
        lengthen_tester(tester)
    lengths = [Tester(0).seq_length, Tester(0, 9).seq_length, Tester(0, seq_length=9).seq_length]
    assert [*lengths, Chosen(0).seq_length] == [FEW * LONGER, 9, 9, 5]
    assert [Named(0).seq_length, Inherits(0).derived] == [FEW * LONGER, FEW * LONGER + 1]
    assert Inherits(0, seq_length=FEW).seq_length == FEW
