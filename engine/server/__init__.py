"""The engine behind OpenAI's HTTP interface. ``python -m engine.server --help`` tells how to start it."""
