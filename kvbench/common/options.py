"""Makes a command's options from the fields of its request, and calls the command with one request.

A request is a frozen dataclass whose fields say what their options are:

    @dataclass(frozen=True, kw_only=True)
    class CountRequest(Options, heading="What is counted"):
        folder: ExistingFolder = argument("FOLDER")
        most: Count | None = option("Stop after so many.", metavar="N")
        deep: bool = switch("Look into folders, too.", rare=True)

    @takes(CountRequest)
    def count(request: CountRequest) -> int: ...

The type is that of the annotation: a bool is a flag, a Literal is a choice, and a tuple may be given several times.
Options that several commands share are a base class of their requests. --help shows each class under its heading,
without its rare options; --help-all shows every option.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from kvbench.common.files import why_unwritable
from kvbench.common.option_rules import flag


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


class WritableFile(click.Path):
    """A file to be written into a folder that exists: refused before the work, not after it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(super().convert(value, param, ctx))
        if why := why_unwritable(path.absolute().parent):
            self.fail(f"{str(path)!r} cannot be written: {why}.", param, ctx)
        return path


Count = Annotated[int, click.IntRange(1)]
NotNegativeCount = Annotated[int, click.IntRange(0)]
Port = Annotated[int, click.IntRange(0, 65535)]
Seed = Annotated[int, click.IntRange(0, 2**32 - 1)]
Positive = Annotated[float, FiniteRange(min=0, min_open=True)]
Share = Annotated[float, FiniteRange(0, 1)]
NotNegative = Annotated[float, FiniteRange(min=0)]
Integers = Annotated[tuple[int, ...], NumberList(int)]
Numbers = Annotated[tuple[float, ...], NumberList(float)]
Existing = Annotated[Path, click.Path(exists=True, path_type=Path)]
ExistingFile = Annotated[Path, click.Path(exists=True, dir_okay=False, path_type=Path)]
ExistingFolder = Annotated[Path, click.Path(exists=True, file_okay=False, path_type=Path)]
Folder = Annotated[Path, click.Path(file_okay=False, path_type=Path)]
OutputFile = Annotated[Path, WritableFile()]


@dataclass(frozen=True)
class Options:
    """The base class of requests and of groups of options. ``heading``, ``rare``: of the options a subclass declares.

    given: the names of the options that stand on the command line.
    """

    heading: ClassVar[str] = "Options"
    rare: ClassVar[bool] = False
    given: tuple[str, ...] = field(default=(), repr=False, compare=False, kw_only=True)

    def __init_subclass__(cls, heading: str = "Options", rare: bool = False) -> None:
        cls.heading, cls.rare = heading, rare

    @property
    def stated(self) -> list[str]:
        """The names of the options that have a value."""
        return [option.name for option in fields(self) if option.name != "given" and getattr(self, option.name)]

    @classmethod
    def typed(cls, name: str) -> str:
        """Returns the option ``name`` as it is typed, and an argument as help writes it."""
        (metadata,) = (option.metadata for option in fields(cls) if option.name == name)
        if "argument" in metadata:
            return str(metadata["argument"])
        names = metadata.get("option", {}).get("names")
        return str(names[0]) if names else flag(name)

    def values(self) -> dict[str, Any]:
        """Returns every option by its name."""
        return {option.name: getattr(self, option.name) for option in fields(self) if option.name != "given"}

    def part(self, group: type[AnyOptions]) -> AnyOptions:
        """Returns the options of one of the base classes."""
        return group(**{option.name: getattr(self, option.name) for option in fields(group) if option.name != "given"})


AnyOptions = TypeVar("AnyOptions", bound=Options)


def option(
    help: str,
    *names: str,
    default: Any = None,
    required: bool = False,
    rare: bool = False,
    least: float | None = None,
    most: float | None = None,
    **more: Any,
) -> Any:
    """Declares the option of a field.

    ``names``: what is typed, in place of the field's own name. ``rare``: shown by --help-all only. ``least`` and
    ``most``: the range of a number. ``more``: ``metavar``, ``envvar``, ``flag_value`` and others of click.Option.
    """
    facts = {"help": help, "names": names, "rare": rare, "range": (least, most), "more": more}
    return field(default=MISSING if required else default, metadata={"option": facts})


def switch(help: str, *names: str, rare: bool = False, **more: Any) -> Any:
    """Declares the option of a field that is True where it is given."""
    return option(help, *names, default=False, rare=rare, **more)


def argument(metavar: str, default: Any = MISSING) -> Any:
    """Declares a positional argument; a tuple takes all words."""
    return field(default=default, metadata={"argument": metavar})


class RequestOption(click.Option):
    """An option that knows its ``heading`` in --help, and whether it is ``rare``."""

    def __init__(self, *args: Any, heading: str, rare: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading, self.rare = heading, rare

    def get_help_extra(self, ctx: click.Context) -> dict[str, Any]:
        """Words a range, unless it only excludes values that no one would give."""
        extra: dict[str, Any] = dict(super().get_help_extra(ctx))
        extra.pop("range", None)
        if isinstance(self.type, click.IntRange | click.FloatRange) and self.type.max is not None:
            extra["range"] = f"{self.type.min or 0} to {self.type.max}"
        return extra

    def short_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Returns the option's row in --help: one name, or two where it has a letter."""
        all_names = self.opts
        dashes = [name for name in all_names if name.startswith("--")]
        self.opts = [name for name in all_names if name not in dashes[1:]]
        try:
            return self.get_help_record(ctx)
        finally:
            self.opts = all_names


class RequestCommand(click.Command):
    """A command whose --help shows its usual options under headings, and --help-all every one."""

    def __init__(self, *args: Any, request: type[Options], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request = request
        del self.params  # click's empty list, which hides the property

    @cached_property
    def params(self) -> list[click.Parameter]:  # type: ignore[override]
        """The options that the request declares, made when they are first needed: `kvbench --help` needs none."""
        show_all = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            hidden=True,
            callback=_show_all,
            help="Show this message with every option.",
        )
        return [*parameters(self.request), show_all]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shows_all = ctx.meta.get(_SHOWS_ALL, False)
        sections: dict[str, list[tuple[str, str]]] = {}
        others = []
        for param in self.get_params(ctx):
            if isinstance(param, RequestOption):
                if shows_all or not param.rare:
                    record = param.get_help_record(ctx) if shows_all else param.short_record(ctx)
                    sections.setdefault(param.heading, []).append(record)
            elif isinstance(param, click.Option):
                others.append(param.get_help_record(ctx))
        sections.setdefault("Options", []).extend(filter(None, others))
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)
        if not shows_all and any(getattr(param, "rare", False) for param in self.params):
            formatter.write_paragraph()
            formatter.write_text(f"All options: {ctx.command_path} --help-all")


_SHOWS_ALL = f"{__name__}.shows_all"


def _show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_SHOWS_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


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


def takes(
    request: type[AnyOptions], name: str | None = None, *, cls: type[RequestCommand] = RequestCommand, **how: Any
) -> Callable[[Callable[[AnyOptions], int]], RequestCommand]:
    """Decorates a function of one ``request``, which becomes a command with the options that the request declares.

    ``name``: of the command, where it is not the function's. ``how``: ``help``, ``short_help`` and others of
    click.Command.
    """

    def decorate(function: Callable[[AnyOptions], int]) -> RequestCommand:
        def callback(**values: Any) -> int:
            return function(request_in(click.get_current_context(), request))

        callback.__doc__ = function.__doc__
        return click.command(name or function.__name__.replace("_", "-"), cls=cls, request=request, **how)(callback)

    return decorate


def request_in(ctx: click.Context, request: type[AnyOptions]) -> AnyOptions:
    """Makes the request of a command line that is parsed."""
    given = tuple(name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE)
    return request(given=given, **{name: value for name, value in ctx.params.items() if value is not None})


def parameters(request: type[Options]) -> Iterator[click.Parameter]:
    """Yields the arguments and options of ``request``: those of its first base class first, its own last."""
    hints = get_type_hints(request, include_extras=True)
    by_owner: dict[type, list[Any]] = {}
    for declared in fields(request):
        owner = next(cls for cls in request.__mro__ if declared.name in inspect.get_annotations(cls))
        by_owner.setdefault(owner, []).append(declared)
    bases = [cls for cls in request.__mro__[1:] if cls in by_owner]
    for owner in (*bases, request):
        for declared in by_owner.get(owner, ()):
            if "argument" in declared.metadata:
                yield _argument(declared, hints[declared.name])
            elif "option" in declared.metadata:
                yield _option(declared, hints[declared.name], owner)


def _argument(declared: Any, hint: Any) -> click.Argument:
    kind, several = _type(hint, (None, None))
    required = declared.default is MISSING
    metavar = declared.metadata["argument"] if required else f"[{declared.metadata['argument']}]"
    return click.Argument([declared.name], type=kind, nargs=-1 if several else 1, required=required, metavar=metavar)


def _option(declared: Any, hint: Any, owner: type[Options]) -> RequestOption:
    facts = declared.metadata["option"]
    default, more = declared.default, dict(facts["more"])
    kind, several = _type(hint, facts["range"])
    if kind is bool:
        more["is_flag"] = True
    else:
        more |= {"type": kind, "multiple": several}
        if isinstance(kind, click.IntRange | click.FloatRange):
            more.setdefault("metavar", "N")
    if default not in (None, MISSING, ()) and default is not False:
        more["default"] = ",".join(map(str, default)) if isinstance(kind, NumberList) else default
        more.setdefault("show_default", "default" not in facts["help"])
    names = facts["names"] or (flag(declared.name),)
    rare = facts["rare"] or owner.rare
    return RequestOption(
        [declared.name, *names],
        heading=owner.heading,
        rare=rare,
        required=default is MISSING,
        help=facts["help"],
        **more,
    )


def _type(hint: Any, limits: tuple[float | None, float | None]) -> tuple[Any, bool]:
    """Returns click's type of an annotation, and whether the option may be given several times."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Annotated:
        return next(part for part in get_args(hint) if isinstance(part, click.ParamType)), False
    if get_origin(hint) is tuple:
        return _type(get_args(hint)[0], limits)[0], True
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint)), False
    low, high = limits
    ranges = {int: click.IntRange(low, high), float: FiniteRange(low, high)}  # type: ignore[arg-type]
    return {Path: click.Path(path_type=Path), **ranges}.get(hint, hint), False
