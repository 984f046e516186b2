"""What all else stands on: example inputs, probes, outcomes of checks, atomic writes, preserved state, silence."""
