"""The three ways a command can end early, each with its exit code."""

from __future__ import annotations


class UsageError(ValueError):
    """Bad input: the message is one sentence for the user with the value, the limit and the way out."""

    exit_code = 2


class MeasurementError(RuntimeError):
    """The measurement could not be taken (server died, load not driven, pages leaked)."""

    exit_code = 4


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived; a KeyboardInterrupt so that no ``except Exception`` swallows it."""

    exit_code = 130

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name
