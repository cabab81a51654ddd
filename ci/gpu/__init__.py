"""The GPU runner behind ci/gpu.sh: checks and times everything that needs a GPU, in parts that are bounded in time.

``python -m ci.gpu`` (stdlib only, any Python that has torch) prepares an environment and runs each part as a process of
its own. Most parts are a module with ``CASES``, which ``isolated`` runs in child processes (``worker``); ``sweep`` and
``tune`` have a ``main``. Parts know nothing of each other but the facts file of the first.
"""
