"""Recurrence: a small recurrent unit in parallel to every feed-forward, which carries information along the sequence."""
