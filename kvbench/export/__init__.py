"""Writes stored loads as other programs read them."""
