"""Writes the prompt sets of `kvbench quality`, always the same ones.

    python workloads/quality/make_prompt_sets.py [FOLDER]

Texts are the sonnets of workloads/text (public domain) and the held-out text of kvbench-tiny (docstrings and language
reference of Python, PSF licence). Lengths are in characters: about 3 of them make a token of kvbench-tiny.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.quality.prompts import FILLER, FOLDER, PromptText
from kvbench_engine.tiny_model.data import TEMPLATES
from kvbench_engine.tokenizer.train import SONNETS

_FACT, _QUESTION = TEMPLATES[0]
_LONG = 6150  # characters of held-out text that just fit 2048 tokens of kvbench-tiny
_SYSTEM = (
    "You are the assistant of a small public library. Answer in one or two short sentences, in the language of the "
    "question, and only from what the visitor or this note tells you. The library is open from nine to six on working "
    "days and from ten to two on Saturdays; on Sundays and public holidays it stays closed. Books may be kept for four "
    "weeks and renewed twice unless somebody else has asked for them. A card costs nothing for children, pupils and "
    "students. If you do not know something, say so and name the desk on the first floor.\n"
)
_VISITS = (
    ("I would like to keep my books for longer.", "Is the library open on Saturday afternoon?"),
    ("Can my daughter have a card of her own?", "And what does a card cost me?"),
    ("Somebody has asked for the book that I have.", "When do I have to bring it back, then?"),
    ("Do you have the sonnets of Shakespeare?", "May I read them here?"),
    ("Where do I ask about old newspapers?", "Who is there on Monday morning?"),
    ("I lost a book on the train.", "May I buy another copy instead?"),
)


def digits(rng: random.Random, count: int = 5) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def passkey(text: str, value: str, depth: float) -> str:
    """``text`` with a key at ``depth`` between two of its words, and the question at its end."""
    at = round(depth * len(text))
    while 0 < at < len(text) and not text[at].isspace():
        at += 1
    fact, question = (part.format(name="pass", value=value) for part in TEMPLATES[0])
    return text[:at] + fact + text[at:] + question


def easy(rng: random.Random, text: str) -> list[PromptText]:
    """Short passkeys, assignments and copies."""
    made = []
    for i in range(10):
        value, size, depth = digits(rng), rng.randrange(40, 360), i / 9
        prompt = passkey(_piece(rng, text, size), value, depth)
        made.append(PromptText(f"passkey-{i}", (prompt,), 8, value, round(depth, 3)))
    for i, name in enumerate(("speed", "colour", "width", "limit", "price")):
        value = digits(rng)
        fact, question = (part.format(name=name, value=value) for part in TEMPLATES[1 + i % 2])
        prompt = _piece(rng, text, 80) + fact + _piece(rng, text, 150) + question
        made.append(PromptText(f"lookup-{i}", (prompt,), 8, value))
    for i in range(9):
        passage = _piece(rng, text, rng.randrange(140, 260))
        begun = passage[: passage.index(" ", 40)]
        prompt = passage + "\n" + _piece(rng, text, rng.randrange(20, 200)) + "\n" + begun
        rest = passage[len(begun) :].strip()
        made.append(PromptText(f"copy-{i}", (prompt,), 16, rest[: rest.index(" ", 12)]))
    return made


def average(rng: random.Random, text: str, sonnets: Sequence[str]) -> list[PromptText]:
    """Continuations of a few hundred tokens: prose and verse."""
    prose = [_piece(rng, text, rng.randrange(400, 1100)) for _ in range(14)]
    verse = ["\n\n".join(rng.sample(sonnets, 1))[: rng.randrange(300, 600)] for _ in range(6)]
    return [PromptText(str(i), (each,), 32) for i, each in enumerate([*prose, *verse])]


def long_context(rng: random.Random, text: str) -> list[PromptText]:
    """Passkeys in texts up to nearly the context of kvbench-tiny."""
    made = []
    for i, (depth, share) in enumerate(((0.0, 0.3), (0.7, 0.5), (0.3, 0.75), (1.0, 1.0))):
        value, size = digits(rng), round(_LONG * share)
        made.append(PromptText(f"{i}", (passkey(_piece(rng, text, size), value, depth),), 8, value, depth))
    return made


def malformed(rng: random.Random, text: str) -> list[PromptText]:
    """What servers are sent by mistake or on purpose; there is no right answer."""
    cut = '{"messages": [{"role": "user", "content": "' + _piece(rng, text, 120).replace("\n", "\\n")
    controls = "".join(map(chr, (*range(1, 32), 127, *range(128, 160))))
    texts = [
        "a", " ", "\n", "\t\t\t\t", "?" * 3, "\x00", "\ufeff", "." * 400, "na " * 200, "0" * 300, "\n" * 120, " " * 250,
        "the " * 150, controls, controls * 3, "\u202e" + _piece(rng, text, 60) + "\u202c", "\u200b".join("zero width"),
        "e\u0301" * 60, "\U0001f468\u200d\U0001f469\u200d\U0001f467 " * 12, "\ufffd" * 40, "\U0010fffd\ue000" * 10,
        "Привет, как дела? 你好吗？ مرحبا كيف حالك؟ こんにちは Γειά σου שלום " * 2, "ｆｕｌｌ ｗｉｄｔｈ " * 8, cut,
        cut[: len(cut) // 3], '{"a": [1, 2, {"b": "' * 12, "]]}}" * 30, "<|endoftext|" * 10, "<div><p>" * 25,
        "%s%n%x\\u0000\\x00" * 12, "SELECT * FROM t; -- " * 10, "A" * 90 + _piece(rng, text, 200) + "B" * 90,
    ]  # fmt: skip
    texts += ["".join(chr(rng.randrange(32, 0x2FFF)) for _ in range(80)) for _ in range(3)]
    return [PromptText(str(i), (each,), 16) for i, each in enumerate(texts)]


def production_like(rng: random.Random, text: str) -> list[PromptText]:
    """Chats behind one system text: a fact of the first turn is asked for in the third."""
    made = []
    for i, (first, second) in enumerate(_VISITS):
        value = digits(rng)
        note = _piece(rng, text, rng.randrange(60, 400)) if i % 2 else ""
        turns = (
            f"{_SYSTEM}\nVisitor: {first}{_FACT.format(name='pass', value=value)} {note}\nAssistant:",
            f"\nVisitor: {second}\nAssistant:",
            f"\nVisitor: Thank you. One more thing.{_QUESTION.format(name='pass')}",
        )
        made.append(PromptText(str(i), turns, 16, value, 0.5))
    for i in range(4):
        question = f"{_SYSTEM}\nVisitor: Please go on with this text.\n{_piece(rng, text, 500)}\nAssistant:"
        made.append(PromptText(f"single-{i}", (question,), 32))
    return made


def _piece(rng: random.Random, text: str, size: int) -> str:
    """``size`` characters or a few more from a random place, whole words."""
    start = text.index(" ", rng.randrange(0, len(text) - size - 200)) + 1
    return text[start : text.index(" ", start + size)]


def make_all() -> dict[str, list[PromptText]]:
    """The prompts of each set."""
    text = FILLER.read_text(encoding="utf-8")
    sonnets = [part for part in SONNETS.read_text(encoding="utf-8").split("\n\n") if len(part) > 300]
    rng = random.Random(19)
    return {
        "easy": easy(rng, text),
        "average": average(rng, text, sonnets),
        "long-context": long_context(rng, text),
        "malformed": malformed(rng, text),
        "production-like": production_like(rng, text),
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, prompts in make_all().items():
        (folder / f"{name}.jsonl").write_text("".join(each.row for each in prompts), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
