"""Models larger than memory: rewritten from directory to directory, with one site in memory at a time."""
