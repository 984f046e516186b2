"""LSH attention: every token attends to the tokens with the same hash, at a cost linear in the length."""
