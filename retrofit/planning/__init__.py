"""Choice of passes, settings and layers for a model: measurement, prediction, optimization."""
