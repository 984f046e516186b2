"""Files on disk: written completely or not at all, and read without trusting their content."""
