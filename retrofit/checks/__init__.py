"""What a rewritten model is checked for, a file a check, and what is remembered of the dense one to check it against."""
