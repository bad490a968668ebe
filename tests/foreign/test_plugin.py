"""What the plugin hangs on models leaves them named, so that other projects' tests reuse pages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
