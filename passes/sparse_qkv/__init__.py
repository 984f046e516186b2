"""Sparse QKV: queries, keys and values from few weights."""
