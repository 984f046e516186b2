"""Continued pretraining."""
