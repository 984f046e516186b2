"""The checks: each measures the dense model and the rewritten one, and judges the second by the first."""
