"""Rewritten models back in their dense form, where that computes the same."""
