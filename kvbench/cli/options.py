"""What several commands share: options, types of options that click does not have, and a group with a default."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from kvbench.common.errors import UsageError
from kvbench.common.files import why_unwritable
from kvbench.common.parsing import parse_json
from kvbench.workload.request_form import EndpointName

if TYPE_CHECKING:
    from kvbench.workload.file import Workload


class FiniteRange(click.FloatRange):
    """A click.FloatRange that refuses nan, and infinity unless ``inf``."""

    def __init__(self, *args: Any, inf: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inf = inf

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number) or (math.isinf(number) and not self.inf):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class NumberList(click.ParamType):
    """Numbers above 0 with commas between them, ``8,32``; ``kind``: int or float (inf too)."""

    name = "N[,N]"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            numbers = tuple(self.kind(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(number > 0 for number in numbers):
            self.fail(f"{value!r} is not a number above 0, or several with commas between them.", param, ctx)
        return numbers


class OutputFile(click.Path):
    """A file to be written into a folder that exists: refused before the work, not after it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(super().convert(value, param, ctx))
        if why := why_unwritable(path.absolute().parent):
            self.fail(f"{str(path)!r} cannot be written: {why}.", param, ctx)
        return path


class DefaultGroup(click.Group):
    """A group with a command that runs when none is named: ``kvbench history results/`` shows the history.

    A folder with a command's name is given as ``./add``. Without anything at all, the help is shown.
    """

    def __init__(self, *args: Any, default: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def add_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator that adds ``options``, in the order of --help."""

    def add(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def ray_options(what: str) -> Callable[[Any], Any]:
    """A decorator that adds the options of ``--executor``; ``what``: its help."""
    return add_options(
        click.option("--executor", type=click.Choice(["local", "ray"]), default="local", show_default=True, help=what),
        click.option(
            "--ray-address",
            metavar="HOST:PORT",
            help="--executor ray: the cluster's head (default: of the cluster that this machine is in).",
        ),
        click.option(
            "--ray-wait",
            type=FiniteRange(min=0),
            default=60.0,
            show_default=True,
            metavar="S",
            help="--executor ray: wait at most S seconds for a machine that has free what is needed.",
        ),
    )


EXISTING = click.Path(exists=True, path_type=Path)
PROFILE = click.option(
    "--profile", metavar="NAME", help="cpu or gpu: which of the file's profiles to use (default: gpu if there is one)."
)
OVERRIDES = click.option(
    "-o", "--override", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Set a value of the workload after the profile, e.g. -o engine.kv_budget=64MiB. Repeatable.",
)  # fmt: skip
FORM_OPTIONS = (
    click.option("--endpoint-type", type=click.Choice(get_args(EndpointName)),
                 help="Send the load to completions, chat completions, OpenAI's Responses or Anthropic's messages "
                 "(default: the workload's load.endpoint, else completions, or the first that a running server has)."),
    click.option("--extra-body", metavar="JSON",
                 help="Further fields of each request, e.g. '{\"reasoning_effort\": \"low\"}'."),
)  # fmt: skip
SEED = click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of prompts and order (default: the file's)."
)
NO_CALIBRATION = click.option(
    "--no-calibration", is_flag=True, envvar="KVBENCH_NO_CALIBRATION",
    help="Do not calibrate the load client first; the results say so.",
)  # fmt: skip

PROMPT_OPTIONS = (  # the names of vllm bench serve are taken too
    click.option("--input-len", "--random-input-len", "input_len", metavar="N|LOW:HIGH",
                 help="Without a WORKLOAD: prompts of N random tokens, which share nothing."),
    click.option("--output-len", "--random-output-len", "output_len", metavar="N|LOW:HIGH",
                 help="Without a WORKLOAD: N tokens out (ignoring EOS)."),
    click.option("--prefix-len", "--random-prefix-len", "prefix_len", type=click.IntRange(1), metavar="N",
                 help="N more tokens that all prompts begin with."),
    click.option("--dataset-path", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
                 help="Prompts of a ShareGPT file, or lengths (and times) of a trace, in place of --input-len."),
    click.option("--dataset-name", metavar="NAME",
                 help="Its format: sharegpt (the first turn of each conversation) or one of `kvbench trace describe`; "
                 "default: by its content. random: none."),
)  # fmt: skip
_SWEPT_OPTIONS = (
    click.option("--vary", multiple=True, metavar="KEY=A,B",
                 help="Engine settings to compare, e.g. page_size=16,32. Without a WORKLOAD the first value is the "
                 "baseline's; with one, in place of its sweep. Repeatable."),
    click.option("--design", type=click.Choice(("one_at_a_time", "full")),
                 help="Of several settings: each alone beside the baseline, or every combination (default: the file's, "
                 "else one_at_a_time)."),
)  # fmt: skip
ANSWER_OPTIONS = (
    *PROMPT_OPTIONS,
    click.option("--concurrency", "--max-concurrency", "concurrency", type=NumberList(int), metavar="N[,N]",
                 help="Without a WORKLOAD: users, each with one request at a time; a load for each number."),
    click.option("--request-rate", type=NumberList(float), metavar="R[,R]",
                 help="Instead of --concurrency: requests/s at random times, whatever the server does."),
    click.option("--num-prompts", type=click.IntRange(1), metavar="N",
                 help="Requests of a load (default: three times the users, 16 at least; 130 at a rate)."),
    *_SWEPT_OPTIONS,
)  # fmt: skip


def given_options(options: Mapping[str, Any]) -> list[str]:
    """The names of the options that stand on the command line."""
    context = click.get_current_context()
    return [name for name in options if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]


def with_form(options: dict[str, Any]) -> dict[str, Any]:
    """The options with those of ``FORM_OPTIONS`` as overrides of the workload. UsageError."""
    endpoint, extra_body = options.pop("endpoint_type"), options.pop("extra_body")
    overrides = [f"load.endpoint={endpoint}"] if endpoint else []
    if extra_body is not None:
        try:
            is_object = isinstance(parse_json(extra_body), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise UsageError(f"--extra-body {extra_body!r} is no JSON object: write for example '{{\"top_k\": 20}}'")
        overrides.append(f"load.extra_body={extra_body}")
    return options | {"overrides": (*options["overrides"], *overrides)}


def workload_of(workload: str | None, options: Mapping[str, Any], **how: Any) -> Workload:
    """The workload file, or without one the workload that the answers among ``options`` make. Raises UsageError."""
    from kvbench.workload.file import default_profile, load_workload
    from kvbench.workload.from_options import COMMAND_LINE, answers_in, changes_of_file, workload_text

    answers = answers_in(options)
    overrides = list(how.pop("overrides", ()))
    if workload is not None:
        return load_workload(workload, overrides=(*changes_of_file(answers), *overrides), **how)
    text = workload_text(answers, profile=how.get("profile") or default_profile())
    if how.get("repeats"):  # all of them
        overrides.insert(0, "max_minutes=null")
    if options.get("target") or options.get("serve_cmd"):  # one thread is what the built-in engine is compared at
        overrides.insert(0, "engine.num_threads=null")
    return load_workload(COMMAND_LINE, text=text, overrides=overrides, **how)


RUNNING_SERVER_OPTIONS = (
    click.option("--preset", metavar="NAME",
                 help="What kind of server it is: vllm, sglang, tgi, llamacpp or "
                 "transformers (default: OpenAI's API as vLLM speaks it)."),
    click.option("--model", metavar="NAME",
                 help="The model's name at a running server (default: the first it lists); of kvbench mock-server with "
                 "a query, as mock?ttft_ms=20."),
    click.option("--vocab-size", type=click.IntRange(1),
                 help="If a running server does not tell, or to use less: vocab_size in the model's config.json."),
    click.option("--max-model-len", type=click.IntRange(1),
                 help="If a running server does not tell, or to use less: max_position_embeddings in config.json."),
    click.option("--tokenizer", type=EXISTING, metavar="DIR",
                 help="Send a running server texts, made with the tokenizer.json in DIR (default: token ids; where the "
                 "server takes none, texts of the tokenizer that ships)."),
    click.option("--api-key-env", metavar="NAME", help="The environment variable that holds a running server's key."),
    click.option("--tls-ca-file", type=EXISTING, help="https://: certificates to trust."),
    click.option("--no-tls-verify", is_flag=True, help="https://: trust any certificate."),
)  # fmt: skip
TARGET_OPTIONS = (
    click.option("--target", metavar="NAME|URL",
                 help="Launch vllm, sglang, tgi, llamacpp or transformers with the workload's settings (what it cannot "
                 "do is skipped with the reason); or measure an OpenAI-compatible server that runs already, as it is."),
    click.option("--exact", is_flag=True,
                 help="With a launched target: refuse a baseline that it cannot have. Otherwise the nearest one is "
                 "measured, and what differs is said here, in the manifest and in the report."),
    click.option("--target-python", metavar="PATH",
                 help="With --target NAME: the Python that has it; of llamacpp and tgi, the program (llama-server)."),
    click.option("--target-args", metavar="WORDS", help="With a launched target: more words for its command line."),
    click.option("--serve-cmd", metavar="CMD",
                 help="Launch this instead. {port}, {model}, {page_size} and other settings in braces are filled in; "
                 "each setting that the sweep varies needs one. Without any: it takes the built-in server's flags."),
    *RUNNING_SERVER_OPTIONS,
)  # fmt: skip
target_options = add_options(*TARGET_OPTIONS)
