"""Sequence-AltUp: layers that compute every k-th token."""
