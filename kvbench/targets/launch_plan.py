"""``--serve-cmd`` with sweep variables: a launch command in which ``{page_size}`` and the like are replaced.

A word of the command is ``{name}``, or holds it; ``{name:on|off}`` is for settings that are true or false: the first
text where it is true, the second where it is false, and a word that becomes empty is left out. ``{{`` and ``}}`` are
braces. What a sweep varies must appear in the command: otherwise its configurations would all be the same server.
"""

from __future__ import annotations

import shlex
import shutil
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.workload.settings import effective

OF_THE_LAUNCH = ("model", "port", "host")
_HOST = "127.0.0.1"


def is_template(text: str) -> bool:
    """Whether a command has any ``{placeholder}``; without one it takes the built-in server's flags."""
    try:
        return bool(placeholders(text))
    except ValueError:
        return False


def placeholders(text: str) -> frozenset[str]:
    """The names in braces. Raises ValueError where quotes or braces do not match."""
    parts = (part for word in shlex.split(text) for part in string.Formatter().parse(word))
    return frozenset(name for _, name, _, _ in parts if name is not None)


@dataclass(frozen=True)
class CommandTemplate:
    """The words of the command, each still with its placeholders."""

    text: str
    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, known: Sequence[str]) -> CommandTemplate:
        """``known``: the settings that there are. UsageError for a command that cannot be meant."""
        try:
            words = tuple(shlex.split(text))
            fields = [field for word in words for field in string.Formatter().parse(word) if field[1] is not None]
        except ValueError as error:
            raise UsageError(f"--serve-cmd {text!r} is not a command line ({error}): mend quotes and braces") from None
        allowed = (*OF_THE_LAUNCH, *(each for each in known if each not in OF_THE_LAUNCH))
        names = [name for _, name, _, _ in fields]
        for _, name, spec, conversion in fields:
            if name not in allowed:
                raise UsageError(
                    f"--serve-cmd has the placeholder {{{name}}}, which is no setting: the known ones are "
                    f"{', '.join(allowed)}; write {{{{ and }}}} for braces"
                )
            if conversion or (spec and ("|" not in spec or "{" in spec)):
                asked = f"{{{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}}"
                raise UsageError(
                    f"--serve-cmd has {asked}: write {{{name}}} for the value, or {{{name}:ON|OFF}} for two texts, the "
                    "first where it is true; values cannot be formatted"
                )
        if "port" not in names:
            raise UsageError("--serve-cmd has no {port}: the server must listen where kvbench looks for it; add it")
        if not words or shutil.which(words[0]) is None:
            raise UsageError(f"--serve-cmd {text!r}: there is no program {(words or ('',))[0]!r}; give its path")
        return cls(text, words)

    @property
    def names(self) -> frozenset[str]:
        """The placeholders."""
        return placeholders(self.text)

    def require(self, swept: Iterable[str]) -> None:
        """UsageError when a setting that is swept is not in the command."""
        if missing := [name for name in swept if name not in self.names]:
            raise UsageError(
                f"the sweep varies {', '.join(missing)}, and --serve-cmd has no "
                f"{' and no '.join(f'{{{name}}}' for name in missing)}: its configurations would all be the same "
                "server. Add the placeholder, sweep nothing (-o 'sweep={}'), or leave those cells out with --only"
            )

    def not_passed_on(self, settings: Mapping[str, Any]) -> list[str]:
        """Settings of the workload that the command does not have: the server's own values hold there."""
        in_its_folder = ("load_format", "seed", "tokenizer")  # and in the name of any other model
        told = {name: value for name, value in settings.items() if (name, value) != ("layout", "paged")}
        return [name for name in told if name not in self.names and name not in in_its_folder]

    def command(
        self, settings: Mapping[str, Any], *, model: str, port: int | str, kv_budget_bytes: int | None
    ) -> tuple[str, ...]:
        """The words with the values of one configuration. UsageError for a value that nobody has set."""
        values = {name: effective(settings, name) for name in self.names}
        values |= {"model": model, "port": port, "host": _HOST}
        if "kv_budget" in values and kv_budget_bytes is not None:
            values["kv_budget"] = kv_budget_bytes
        for name, value in values.items():
            if value is None:
                raise UsageError(f"--serve-cmd has {{{name}}}, which the workload does not set: add -o engine.{name}=")
        formatter = _Values()
        formatted = (formatter.vformat(word, (), values) for word in self.words)
        return tuple(word for word in formatted if word)


class _Values(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec:
            on, _, off = format_spec.partition("|")
            return on if value else off
        return str(value).lower() if isinstance(value, bool) else str(value)
