"""The engine behind OpenAI's HTTP interface. ``python -m kvbench_engine.server --help`` tells how to start it."""
