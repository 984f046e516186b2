"""Queries, keys and values of a few weights."""
