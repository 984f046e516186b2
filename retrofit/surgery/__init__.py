"""Edits on live modules that can be undone: the journal, wrappers, injected keywords, histories in a cache, auxiliary losses."""
