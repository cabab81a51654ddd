"""Targets: the engines under test. ``base`` is the interface, ``builtin`` launches ours, ``openai`` takes a URL."""
