"""Rows to messages to token ids and labels to packed batches."""
