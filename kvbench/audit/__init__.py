"""Holds benchmark results of other tools against their own data."""
