"""Names of models: digests of their weights, code and settings, and changes of any of these."""
