"""A recommendation as lines for a terminal, wrapped but for commands, which stay whole so that they can be copied."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

import yaml

from kvbench.report.next_steps import NextStep
from kvbench.report.recommend import Recommendation, as_yaml
from kvbench.report.wording import say

_UNBROKEN = "\0"  # in place of a space where a line must not end


def lines(made: Recommendation, width: int = 100) -> list[str]:
    """The recommendation as lines of text: what to set, why, when to go back, what is open; all settings last."""
    text = [line for step in made.doubts for line in _step(step, width)] + _wrapped(made.verdict, width)
    if not made.configuration:
        return text
    text += ["", *_what_to_set(made, width)]
    rejected = say("recommend.not_taken", bool(made.rejected), names=", ".join(made.rejected))
    evidence = filter(None, [*made.evidence, made.answers, rejected])
    text += ["", say("recommend.why", baseline=made.baseline), *_items(evidence, width)]
    if made.fallback:
        back, *when = made.fallback
        first = say("recommend.go_back", bool(when), name=back)
        text += ["", *_wrapped(first, width), *_items(when, width)]
    pair = say("recommend.when_not", bool(made.pair), names=" against ".join(made.pair))
    text += ["", pair, *_items(made.paging, width)]
    if made.alone or made.unmeasured:
        text += ["", say("recommend.open"), *_open(made, width)]
    if made.settings:
        settings = {"engine": dict(made.settings)}
        dumped = yaml.safe_dump(settings, default_flow_style=None, sort_keys=False, width=width - 20)
        text += ["", say("recommend.settings", name=made.configuration), *dumped.splitlines()]
    if made.flags:
        text.append(say("recommend.flags", flags=made.flags))
    return text


def _what_to_set(made: Recommendation, width: int) -> list[str]:
    if made.changed and not made.in_doubt:
        changes = [
            say("recommend.change", name=name, value=as_yaml(made.settings[name]), was=as_yaml(was))
            for name, was in made.changed.items()
        ]
        return [say("recommend.set"), *_items(changes, width)]
    reasons = {"in_doubt": made.in_doubt, "held_back": made.held_back, "other": True}
    form = next(reason for reason, holds in reasons.items() if holds)
    return _wrapped(say("recommend.nothing_to_set", form, name=made.configuration), width)


def _open(made: Recommendation, width: int) -> Iterator[str]:
    """Lists what pays alone with the command that measures it together, then what was not measured."""
    if made.alone:
        yield from _items([say("recommend.alone", names="; ".join(made.alone))], width)
    if made.together and made.together.command:
        yield from _step(NextStep(say("recommend.together"), made.together.command), width, "  - ")
    for step in made.unmeasured:
        yield from _step(step, width, "  - ")


def _step(step: NextStep, width: int, first: str = "") -> list[str]:
    """Makes the lines of a step: its reason, and the command on a line of its own."""
    if not step.command:
        return _wrapped(step.why, width, first)
    return [*_wrapped(f"{step.why}:", width, first), f"{' ' * len(first)}  {step.command}"]


def _items(sentences: Iterable[str], width: int) -> list[str]:
    return [line for sentence in sentences for line in _wrapped(sentence, width, "  - ")]


def _wrapped(sentence: str, width: int, first: str = "") -> list[str]:
    """Lines of at most ``width`` columns after ``first``; what is in backticks is never broken."""
    whole = re.sub("`[^`]*`", lambda command: command[0].replace(" ", _UNBROKEN), sentence)
    wrapped = textwrap.wrap(
        whole, width, initial_indent=first, subsequent_indent=" " * len(first),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace(_UNBROKEN, " ") for line in wrapped]
