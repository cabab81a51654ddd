"""The GPU runner behind ci/gpu.sh: checks and times everything that needs a GPU, in parts that are bounded in time.

``python -m ci.gpu`` (stdlib only, any Python that has torch) prepares an environment and runs each part as a process
of its own; a part is a module here with a ``main``. Parts know nothing of each other but the facts file of the first.
"""
