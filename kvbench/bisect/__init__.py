"""Finds the commit, or the version of a package, that made a metric worse or changed what an engine does."""
