"""The anatomy as a picture."""
