"""A rewritten model as a directory with its own modelling code, which loads without retrofit."""
