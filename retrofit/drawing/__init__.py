"""Anatomies and training runs for people: tables, drawings, curves."""
