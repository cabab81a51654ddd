"""The options that make or change a workload: several commands take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import click

from kvbench.common.errors import UsageError
from kvbench.common.options import Count, Integers, Numbers, Options, Seed, option
from kvbench.common.parsing import parse_json
from kvbench.workload.request_form import EndpointName

_FILE = "Changes of the workload"
_NO_FILE = "A workload from options, without a file"


@dataclass(frozen=True, kw_only=True)
class FileOptions(Options, heading=_FILE):
    """The options that choose and change what a workload file says."""

    profile: str | None = option(
        "cpu or gpu: which of the file's profiles to use (default: gpu if there is one).", metavar="NAME"
    )
    overrides: tuple[str, ...] = option(
        "Set a value of the workload after the profile, e.g. -o engine.kv_budget=64MiB. Repeatable.",
        "-o", "--override", default=(), metavar="KEY=VALUE",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SeedOptions(FileOptions, heading=_FILE):
    """The options of a file, and the seed of what is drawn."""

    seed: Seed | None = option("Seed of prompts and order (default: the file's).", rare=True)


@dataclass(frozen=True, kw_only=True)
class FormOptions(SeedOptions, heading=_FILE, rare=True):
    """The options of a workload whose requests go over HTTP, with the form of the requests."""

    endpoint_type: EndpointName | None = option(
        "The API that requests are sent to: completions, chat completions, OpenAI's Responses or Anthropic's messages "
        "(default: the workload's load.endpoint, else completions, or the first that a running server has)."
    )
    extra_body: str | None = option(
        'Further fields of each request, e.g. \'{"reasoning_effort": "low"}\'.', metavar="JSON"
    )

    @property
    def changes(self) -> tuple[str, ...]:
        """The overrides of the workload, with the form of the requests among them. Raises UsageError."""
        changes = list(self.overrides)
        if self.endpoint_type:
            changes.append(f"load.endpoint={self.endpoint_type}")
        if self.extra_body is not None:
            try:
                is_object = isinstance(parse_json(self.extra_body), dict)
            except ValueError:
                is_object = False
            if not is_object:
                raise UsageError(
                    f"--extra-body {self.extra_body!r} is no JSON object: write for example '{{\"top_k\": 20}}'"
                )
            changes.append(f"load.extra_body={self.extra_body}")
        return tuple(changes)


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Options, heading=_NO_FILE):
    """The prompts of a workload without a file; the names of vllm bench serve are taken too."""

    input_len: str | None = option(
        "Prompts of N random tokens, which share nothing.",
        "--input-len", "--random-input-len", metavar="N|LOW:HIGH",
    )  # fmt: skip
    output_len: str | None = option(
        "Answers of N tokens (the end token is ignored).",
        "--output-len", "--random-output-len", metavar="N|LOW:HIGH",
    )  # fmt: skip
    prefix_len: Count | None = option(
        "N more tokens that all prompts begin with.",
        "--prefix-len", "--random-prefix-len", metavar="N", rare=True,
    )  # fmt: skip
    dataset_path: Annotated[str, click.Path(exists=True, dir_okay=False)] | None = option(
        "Take the prompts of a ShareGPT file, or the lengths (and times) of a trace, in place of --input-len.",
        metavar="FILE",
    )
    dataset_name: str | None = option(
        "The format of --dataset-path: sharegpt (the first turn of each conversation) or one that "
        "`kvbench trace describe` names (default: found by its content). random: no file.",
        metavar="NAME", rare=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ArrivalOptions(Options, heading=_NO_FILE):
    """The loads of a workload without a file."""

    concurrency: Integers = option(
        "Users, each with one request at a time; a load for each number.",
        "--concurrency", "--max-concurrency", default=(), metavar="N[,N]",
    )  # fmt: skip
    request_rate: Numbers = option(
        "Instead of --concurrency: requests/s at random times, whatever the server does.", default=(), metavar="R[,R]"
    )
    num_prompts: Count | None = option(
        "Requests of a load (default: three times the users, 16 at least; 130 at a rate).", metavar="N", rare=True
    )


@dataclass(frozen=True, kw_only=True)
class VaryOptions(Options, heading="What to compare"):
    """The settings that are compared."""

    vary: tuple[str, ...] = option(
        "Engine settings to compare, e.g. page_size=16,32. Without a WORKLOAD the first value is the baseline's; with "
        "one, this replaces its sweep. Repeatable.",
        default=(), metavar="KEY=A,B",
    )  # fmt: skip
    design: Literal["one_at_a_time", "full"] | None = option(
        "How several settings are combined: each alone beside the baseline, or every combination (default: the file's, "
        "else one_at_a_time).",
        rare=True,
    )


@dataclass(frozen=True, kw_only=True)
class Answers(PromptOptions, ArrivalOptions, VaryOptions):
    """The answers of a user that make a workload, or the options that were given.

    ``input_len``, ``output_len``: tokens, "600" or a range "400:800".
    ``prefix_len``: tokens that all prompts begin with, on top of ``input_len``.
    ``dataset_path``: a file of conversations or a trace that gives prompts or lengths, in place of random tokens;
    ``dataset_name``: its format ("random" without one).
    ``concurrency``: users of each closed loop; ``request_rate``: requests/s of each open loop.
    ``num_prompts``: requests of a load.
    ``vary``: "page_size=16,32"; the first value of each is the baseline's.
    """
