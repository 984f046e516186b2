"""Inputs of models, and recorded inputs of their modules."""
