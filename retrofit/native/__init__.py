"""Mixtures that a pass made, converted to an architecture of transformers with its own mixtures."""
