"""S3 as a cold tier: a machine with empty memory finds what another one computed.

python examples/s3.py s3://bucket/kv  # pip install 'flowkv[object]'

Credentials and the server come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_REGION, and AWS_ENDPOINT_URL for a server of your own (docs/guides/remote.md has one to try).
With a disk between host and bucket, the bucket gets what the disk has no room for.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import flowkv
from flowkv.data import tiny_path  # a trained model that comes with FlowKV; its tokens are bytes

if len(sys.argv) < 2:
    raise SystemExit("Name a bucket: python examples/s3.py s3://bucket/kv")

model = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
text = "import os\nimport sys\n\n\nclass Stack:\n    def push(self, item):\n" * 20
prompt = torch.tensor([list(text.encode())])

for machine in ("first machine", "second machine"):
    kv = flowkv.attach(model, tiers=["gpu:16MiB", "host:32MiB", sys.argv[1]])
    model.generate(prompt, max_new_tokens=8, do_sample=False)
    kv.flush()  # waits for what is still on its way to the bucket
    found, bucket = kv.stats()["tokens_reused"], kv.stats()["tiers"][sys.argv[1]]
    print(
        f"{machine}: {found} of {prompt.shape[1]} tokens found;"
        f" {bucket['loaded_bytes'] >> 10} KiB came from {sys.argv[1]},"
        f" {bucket['stored_bytes'] >> 10} KiB went there"
    )
    kv.detach()
    kv.close()
