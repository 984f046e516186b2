"""Files on disk: written whole or not at all, read with suspicion."""
