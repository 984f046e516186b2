"""Distances between two computations, and their causes."""
