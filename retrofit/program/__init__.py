"""A model as a program: captured, functionalized, its data flow, its cost."""
