"""What a model runs on, and what its modules receive."""
