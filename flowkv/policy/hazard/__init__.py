"""The learned order: how likely and how soon a chain is used again."""
