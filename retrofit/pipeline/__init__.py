"""Passes as data: options, specs, recipes, running them, and the text and data they are calibrated on."""
