"""Reversible: activations are computed again from outputs, so that training memory does not grow with depth."""
