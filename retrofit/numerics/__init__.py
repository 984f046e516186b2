"""How far two computations lie apart, and why."""
