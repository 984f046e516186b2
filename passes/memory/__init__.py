"""External memory beside layers."""
