"""Passes as data: the protocol, options, specs and recipes; running and replaying them; calibration text."""
