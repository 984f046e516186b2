"""Rewritten models back in their dense form, if that computes the same function."""
