"""Which passes, with which settings, in which layers of one model: measured, predicted, chosen."""
