"""Feed-forwards as mixtures of experts."""
