"""Controller-sparse feed-forwards."""
