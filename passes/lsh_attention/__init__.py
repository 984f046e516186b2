"""LSH attention: every token attends to the tokens with the same hash, at a cost below the square of the length."""
