"""Mixtures that a pass made, as an architecture of transformers that has such mixtures itself."""
