"""What tests share: tiny models, the zoo, models retrofitted, pictures read back."""
