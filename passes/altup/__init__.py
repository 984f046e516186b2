"""AltUp: the residual stream widened."""
