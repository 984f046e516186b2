"""The activation-sparsity pass."""
