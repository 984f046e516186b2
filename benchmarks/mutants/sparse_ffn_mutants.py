"""Faults of sparse-ffn: the choice of units, the training noise, the two ways to compute, the start."""

from __future__ import annotations

from mutant import Mutant

MUTANTS: list[Mutant] = []
