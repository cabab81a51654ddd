"""Adapters of other engines for engine time: scripts that the engine's own Python runs (docs/engines.md)."""
