"""External memory: tables of partial experts for layers."""
