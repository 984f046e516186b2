"""A rewritten model as a directory with its own modelling code, which loads where retrofit is not installed."""
