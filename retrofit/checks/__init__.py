"""One check a file: what it measures, and how it judges that against the dense model."""
