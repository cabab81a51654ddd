"""Load generation: schema, prompts, arrivals, traces, and the load process (``python -m kvbench.load``).

Importing this package patches nothing; only ``kvbench/load/__main__.py`` applies gevent's patches.
"""
