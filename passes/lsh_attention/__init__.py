"""LSH attention: every token attends to those whose hash is its own, and the length costs no square."""
