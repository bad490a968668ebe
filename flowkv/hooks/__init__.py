"""Attachment of models: one function call for your own, one line for Hugging Face models."""
