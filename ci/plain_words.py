"""Checks the language of the code: ``python -m ci.plain_words [PATH...]``, a part of ``make lint``.

Four rules, each decided by the text alone:

- ``beginning``: a docstring's first sentence begins with a verb, an article or a noun. Refused are the words of
  ``NO_BEGINNING`` (prepositions, question words, pronouns, conjunctions, a few participles), a sign, a bracket or a
  digit (an example belongs inside a sentence), and a lower-case word that names nothing. A literal in backquotes, and a
  lower-case word with a capital, a digit, a dot, an underscore or an apostrophe in it (``float32``) are names. A
  literal alone (a parameter and its colon) begins the docstring of a module only, as the name of a command does.
- ``length``: that sentence has at most 20 words. It ends at a full stop, a colon, ``?`` or ``!`` before a space, or at
  the first empty line; a semicolon does not end it. A literal in backquotes is one word; signs without a letter
  or a digit are none.
- ``class``: a class name stands once in kvbench, engine, kernels and ci together, and once within tests/support.
- ``local``: no variable or parameter has a name of ``EMPTY_NAMES``. Fields of classes are not variables.

Prints ``file:line: rule: what is wrong, and what to do``. Exit code 0 without a breach, 1 with one, 2 for a PATH that
is not there. ``[tool.plain_words] exclude`` in pyproject.toml names files and folders that are not checked.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_PATHS = ("kvbench", "engine", "kernels", "ci", "tests")
UNIQUE_CLASSES = (("kvbench", "engine", "kernels", "ci"), ("tests/support",))
MOST_WORDS = 20
_PREPOSITIONS = (
    "of by as from in at on per to for with without within after before until till since under over up off out down "
    "against among between beside besides beyond through during inside outside upon via about above below like"
)
_QUESTIONS = "what how which whose who whom where when why whether whatever whichever whoever wherever whenever"
_PRONOUNS = "this that these those it its he she they their them there here such"
_CONJUNCTIONS = (
    "if else unless though although because while so and or but nor also then thus otherwise once only not never"
)
_PARTICIPLES = "held kept drawn told said asked given known found seen"
NO_BEGINNING = frozenset(" ".join((_PREPOSITIONS, _QUESTIONS, _PRONOUNS, _CONJUNCTIONS, _PARTICIPLES)).split())
EMPTY_NAMES = frozenset({"found", "known", "each", "said", "told", "of"})
LOWER_CASE_NAMES = frozenset(
    {"click", "dynamo", "kvbench", "numba", "pip", "pytest", "torch", "transformers", "uvicorn"}
)

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LITERAL = re.compile(r"(`+).+?\1")
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\bcf)[.:?!][)\"']*(?=\s|$)|::")


@dataclass(frozen=True)
class Breach:
    """One place that breaks a rule: ``rule`` names it, ``text`` says what is wrong and what to do."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def first_sentence(docstring: str) -> str:
    """The docstring's text up to its first sentence's end, on one line, with each literal as one word."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    literals = _LITERAL.sub(lambda match: "`" + re.sub(r"[\s.:;?!]", "_", match[0].strip("`")) + "`", paragraph)
    end = _SENTENCE_END.search(literals)
    return literals[: end.start()] if end else literals


def check_docstring(docstring: str, of_module: bool = False) -> Iterator[tuple[str, str]]:
    """Yields the rule and the text of each breach in a docstring."""
    sentence = first_sentence(docstring)
    words = [word for word in sentence.split() if re.search(r"\w", word)]
    first = re.sub(r"[,;:]+$", "", sentence.split()[0]) if sentence.split() else ""
    if first == sentence and first.startswith("`") and not of_module:
        yield "beginning", f"{sentence} alone is no sentence: say what the function or class is for, then its fields"
    if not _can_begin(first):
        yield "beginning", f'"{_shortened(sentence)}" begins with "{first}": begin with a verb or an article'
    if len(words) > MOST_WORDS:
        yield "length", f'"{_shortened(sentence)}" has {len(words)} words: at most {MOST_WORDS}, make it two sentences'


def _can_begin(word: str) -> bool:
    if word.startswith("`"):
        return True
    if word.lower() in NO_BEGINNING or not word[:1].isalpha():
        return False
    is_name = word in LOWER_CASE_NAMES or re.search(r"[A-Z0-9._'/]", word) is not None
    return word[0].isupper() or is_name


def _shortened(sentence: str) -> str:
    return sentence if len(sentence) <= 60 else sentence[:57] + "..."


def check_file(path: Path, nodes: Sequence[ast.AST]) -> Iterator[Breach]:
    """Yields the breaches of the rules about docstrings and variables among a file's ``nodes``."""
    fields = {field for node in nodes if isinstance(node, ast.ClassDef) for field in _fields(node)}
    for node in nodes:
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)) is not None:
            for rule, text in check_docstring(docstring, isinstance(node, ast.Module)):
                yield Breach(path, getattr(node, "lineno", 1), rule, text)
        name = _variable(node)
        if name in EMPTY_NAMES and node not in fields:
            yield Breach(path, node.lineno, "local", f'a variable is called "{name}": name it for what it holds')


def _fields(owner: ast.ClassDef) -> Iterator[ast.expr]:
    for statement in owner.body:
        if isinstance(statement, ast.Assign):
            yield from statement.targets
        elif isinstance(statement, ast.AnnAssign):
            yield statement.target


def _variable(node: ast.AST) -> str | None:
    """Returns the name that ``node`` binds as a variable or a parameter, or None."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name) | ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
            return name
    return None


def repeated_classes(files: dict[Path, list[ast.AST]]) -> Iterator[Breach]:
    """Yields a breach for each class name that an earlier file of the same part of the tree defines too."""
    for roots in UNIQUE_CLASSES:
        first_place: dict[str, str] = {}
        for path, nodes in files.items():
            if not any(path.is_relative_to(root) for root in roots):
                continue
            for node in nodes:
                if not isinstance(node, ast.ClassDef):
                    continue
                place = f"{path}:{node.lineno}"
                first = first_place.setdefault(node.name, place)
                if first != place:
                    text = f'a class "{node.name}" stands in {first} too: name one of them for what it is'
                    yield Breach(path, node.lineno, "class", text)


def python_files(paths: Sequence[Path]) -> list[Path]:
    """Lists the Python files that ``paths`` are or contain, in order, each once."""
    files = set()
    for path in paths:
        files.update(path.rglob("*.py") if path.is_dir() else [path])
    return sorted(files)


def check(paths: Sequence[Path], exclude: Sequence[str] = ()) -> list[Breach]:
    """Checks the files of ``paths``; class names are compared with the whole tree under the working directory."""
    compared = [Path(root) for roots in UNIQUE_CLASSES for root in roots if Path(root).is_dir()]
    checked = {file for file in python_files(paths) if not any(file.is_relative_to(name) for name in exclude)}
    everywhere = sorted(checked.union(python_files(compared)))
    nodes = {file: list(ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file)))) for file in everywhere}
    breaches = [breach for file in checked for breach in check_file(file, nodes[file])]
    breaches += [breach for breach in repeated_classes(nodes) if breach.path in checked]
    return sorted(breaches, key=lambda breach: (breach.path, breach.line))


def excluded() -> list[str]:
    """Reads ``[tool.plain_words] exclude`` from pyproject.toml in the working directory."""
    settings = Path("pyproject.toml")
    if not settings.is_file():
        return []
    return tomllib.loads(settings.read_text(encoding="utf-8"))["tool"].get("plain_words", {}).get("exclude", [])


def main(arguments: Sequence[str]) -> int:
    """Runs the check on ``arguments`` (paths; none: the whole tree) and returns the exit code."""
    paths = [Path(argument) for argument in arguments or DEFAULT_PATHS]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        print(f"{', '.join(missing)}: no such file or folder; run this in the repository's root", file=sys.stderr)
        return 2
    breaches = check(paths, excluded())
    for breach in breaches:
        print(breach)
    if breaches:
        print(f"{len(breaches)} breaches of the rules in ci/plain_words.py")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
