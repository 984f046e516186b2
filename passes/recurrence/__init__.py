"""Recurrence: a small recurrent unit beside every feed-forward, by which a layer passes information on in time."""
