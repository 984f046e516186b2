"""Edits on live modules that can be undone: the journal, wrappers, injected keywords, memory in a cache, auxiliary losses."""
