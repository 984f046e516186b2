"""Models as FX graph modules."""
