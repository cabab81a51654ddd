"""What BASE and CANDIDATE of ``kvbench compare`` may be, told from their text (``sides`` makes them launchable).

    main, v1.2, 3fe141a, HEAD, .        a git ref: built in a folder and an environment of its own (. = as it is now)
    'vllm serve {model} --port {port}'  a command that launches a server; without {port}: with the built-in one's flags
    http://127.0.0.1:8000               a server that runs already
    page_size=16,kv_cache_dtype=auto    settings of one engine, laid on the workload's
    results/mixed/20260101T120000Z-1a2  a run that was stored, with its manifest.json

A text that could be two of these is refused; ``ref:``, ``cmd:``, ``url:``, ``set:`` and ``run:`` in front say which.
"""

from __future__ import annotations

import difflib
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.packages import HOUSE
from kvbench.gate.compare import worktrees
from kvbench.gate.verdict.wording import shortened
from kvbench.runs.folder import MANIFEST
from kvbench.workload.layers import apply_override

REF, CMD, URL, SET, RUN = "ref", "cmd", "url", "set", "run"
KINDS = (REF, CMD, URL, SET, RUN)
_TITLES = {
    REF: "a git ref",
    CMD: "a launch command",
    URL: "a URL",
    SET: "settings",
    RUN: "a folder of results",
}
_SETTING = r"(?:engine\.)?[A-Za-z_]\w*\s*="
_NEXT_SETTING = re.compile(rf",\s*(?={_SETTING})")  # a comma inside a value is part of it
_LONGEST_NAME = 60


@dataclass(frozen=True)
class Side:
    """BASE or CANDIDATE as it was given. ``text``: without its prefix; ``settings``: of one that is settings."""

    kind: str
    text: str
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """For a table."""
        if self.kind == REF and self.text == worktrees.WORKING_TREE:
            return "working tree"
        if self.kind == RUN:
            return "/".join(Path(self.text).parts[-2:])
        return shortened(self.text, _LONGEST_NAME)  # with both ends: two commands may differ in their last word

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text, "name": self.name, "settings": dict(self.settings)}


def parse_side(text: str, repo: Path = HOUSE) -> Side:
    """What ``text`` means; refs are looked for in ``repo``. UsageError where it means nothing, or two things."""
    asked, sign, rest = text.partition(":")
    if sign and asked in KINDS:
        return _side(asked, rest.strip(), repo)
    if not text.strip():
        raise UsageError(f"a side of the comparison is empty: give {_choices()}")
    kinds = _possible(text, repo)
    if len(kinds) == 1:
        return _side(kinds[0], text, repo)
    if kinds:
        both = " and ".join(_TITLES[kind] for kind in kinds)
        raise UsageError(f"{text!r} could be {both}: write {' or '.join(f'{kind}:{text}' for kind in kinds)}")
    raise UsageError(f"{text!r} is {_why_nothing(text, repo)}: give {_choices()}")


def _possible(text: str, repo: Path) -> list[str]:
    if re.match(r"https?://\S+$", text, re.IGNORECASE):
        return [URL]
    found = []
    if _is_ref(text, repo):
        found.append(REF)
    if text != worktrees.WORKING_TREE and (Path(text).expanduser() / MANIFEST).is_file():
        found.append(RUN)
    if re.match(_SETTING, text.strip()):
        found.append(SET)
    if re.search(r"\s", text.strip()) or "{port}" in text:
        words = _words(text)
        if "{port}" in text or (words and shutil.which(words[0])):
            found.append(CMD)
    return found


def _is_ref(text: str, repo: Path) -> bool:
    top = worktrees.top_folder(repo)
    return top is not None and (text == worktrees.WORKING_TREE or worktrees.find_sha(top, text) is not None)


def _side(kind: str, text: str, repo: Path) -> Side:
    """A side of a kind that is settled. UsageError where the text cannot be that."""
    if not text:
        raise UsageError(f"{kind}: has nothing behind it: give {_TITLES[kind]}")
    if kind == REF and not _is_ref(text, repo):
        worktrees.find_commit(repo, text)  # says why
    if kind == RUN and not (Path(text).expanduser() / MANIFEST).is_file():
        raise UsageError(f"{text!r} is no folder of results: it has no {MANIFEST}; give the folder of one run")
    if kind == CMD:
        _require_program(text)
    return Side(kind, text, parse_settings(text) if kind == SET else {})


def parse_settings(text: str) -> dict[str, Any]:
    """``page_size=16,engine.swap_space=1GiB`` with values as in YAML, as ``-o`` takes them. Raises UsageError."""
    found: dict[str, Any] = {}
    for part in _NEXT_SETTING.split(text.strip()):
        key, sign, value = part.partition("=")
        name = key.strip().removeprefix("engine.")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UsageError(f"{part!r} is no setting of the engine: write NAME=VALUE,NAME=VALUE (page_size=16)")
        if name in found:
            raise UsageError(f"{text!r} sets {name} twice: give it once")
        data: dict[str, Any] = {"engine": {}}
        apply_override(data, f"engine.{name}={value}")
        found |= data["engine"]
        if isinstance(found[name], dict | list):
            raise UsageError(f"{part!r}: a side has one value a setting; give a number, a text, true or false")
    return found


def _require_program(text: str) -> None:
    words = _words(text)
    if words is None:
        raise UsageError(f"{text!r} is not a command line: mend the quotes")
    if not words or ("{" not in words[0] and shutil.which(words[0]) is None):
        raise UsageError(f"{text!r}: there is no program {(words or [''])[0]!r}; give its path")


def _words(text: str) -> Sequence[str] | None:
    try:
        return shlex.split(text)
    except ValueError:
        return None


def _choices() -> str:
    return (
        "a git ref (`.`: the working tree), a launch command with {port}, a URL, settings (page_size=16), or the "
        f"folder of a stored run; {', '.join(f'{kind}:' for kind in KINDS)} in front says which"
    )


def _why_nothing(text: str, repo: Path) -> str:
    """Why none of the kinds fits, with what was probably meant."""
    top = worktrees.top_folder(repo)
    if Path(text).expanduser().exists():
        return f"a file or folder without {MANIFEST}, so no stored run, and no git ref"
    if re.search(r"\s", text):
        return f"no command that can be launched (there is no program {(_words(text) or [text])[0]!r})"
    if top is None:
        return f"not a git ref, since {repo} is no git repository (--repo PATH names one)"
    near = difflib.get_close_matches(text, worktrees.names(top), n=1)
    return f"no git ref of {top}" + (f" (did you mean {near[0]}?)" if near else "")
