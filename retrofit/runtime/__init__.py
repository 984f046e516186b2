"""What everything else builds on: example inputs, probes, calibration data, atomic writes, preserved state, modes, silence."""
