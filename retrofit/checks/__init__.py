"""The checks: each measures the dense model and the rewritten one, and compares the two."""
