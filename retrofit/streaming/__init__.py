"""Models larger than memory: rewritten from directory to directory, with one site of them in memory at a time."""
