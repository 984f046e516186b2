"""The anatomy of a transformer and how it is found in the data flow of its program."""
