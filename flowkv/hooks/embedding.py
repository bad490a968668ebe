"""Public name of `write_table`, which is in `flowkv.tensors.embedding`."""

from flowkv.tensors.embedding import write_table as write_table  # noqa: PLC0414
