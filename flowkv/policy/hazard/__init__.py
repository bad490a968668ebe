"""The learned order: how likely is it that this chain is used again, and how soon."""
