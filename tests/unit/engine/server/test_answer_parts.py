"""Thoughts, text and tool calls come out the same wherever the text is cut; the oracle reads it whole with regexes."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbench_engine.server.answer_parts import HEADER_CHARACTERS, AnswerParts, Delta

BODIES = {  # the text between the tags of a call -> its name and arguments
    '{"name": "f", "arguments": {"x": "}\\"{\\\\", "y": {}}}': ("f", '{"x": "}\\"{\\\\", "y": {}}'),
    ' \n{"name":"g","arguments":{}, "id": {"n": 7}}\n': ("g", "{}"),
    '{"arguments": {"a": "\u00e9<think>"}, "name": "h"}': ("h", '{"a": "\\u00e9<think>"}'),
    '{"name": "cut", "arguments": {"a": "b': ("cut", '{"a": "b'),
    '{"name": "\\u006e", "arguments": {"a": [1]}}': ("n", '{"a": [1]}'),
}
NO_CALLS = [
    "", "no JSON", "[1]", "5", "[" * 100_000, '{"name": "f"}', '{"name": "f", "arguments": []}', '{"arguments": {}}',
    '{"name": 5, "arguments": {}}', '{"name": "", "arguments": {}}', '{"name": "\\ud800", "arguments": {}}',
]  # fmt: skip
PLAIN = ["a", " ", "\n", "<", "</", "<t", "think>", "tool_call>", "\u00e9", "<think>", "</think>", "<tool_call>"]
CALLS = [f"<tool_call>{body}{end}" for body in [*BODIES, *NO_CALLS[:4]] for end in ("</tool_call>", "</tool_call>\n ")]
TEXTS = st.lists(st.sampled_from(PLAIN) | st.sampled_from(CALLS), max_size=9).map("".join)
CUTS = st.lists(st.integers(0, 5), max_size=60)


def oracle(text: str, reasoning: bool, tools: bool, thinking: bool) -> tuple[str, str, list[tuple[str, str]], set[int]]:
    """Reasoning, content, calls, and the places of the characters of the reasoning."""
    thought, call = r"(?P<thought>.*?)(?:</think>|\Z)", r"<tool_call>(?P<body>.*?)(?:</tool_call>|\Z)"
    patterns = [f"<think>{thought}"] * reasoning + [call] * tools
    pattern = re.compile("|".join(patterns), re.DOTALL)
    said, content, calls, places, at, strip = "", "", [], set(), 0, False
    match = re.compile(thought, re.DOTALL).match(text) if thinking else pattern.search(text)
    while match is not None:
        between = text[at : match.start()]
        content += between.lstrip() if strip else between
        at, strip = match.end(), False
        groups = match.groupdict()
        if groups.get("thought") is not None:
            begin, end = match.span("thought")
            tags = [range(begin + tag.start(), begin + tag.end()) for tag in re.finditer("<think>", text[begin:end])]
            shown = [i for i in range(begin, end) if not any(i in tag for tag in tags)]
            said += "".join(text[i] for i in shown)
            places |= set(shown)
        elif groups["body"] in BODIES:
            calls.append(BODIES[groups["body"]])
            strip = True
        else:
            content += match[0]
        match = pattern.search(text, at)
    return said, content + (text[at:].lstrip() if strip else text[at:]), calls, places


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


def joined(deltas: list[Delta]) -> tuple[str, str, list[tuple[str, str]]]:
    """What a client makes of the deltas."""
    said, calls = {"reasoning": "", "content": ""}, []
    for delta in map(dict, deltas):
        assert delta, "an event says nothing"
        for call in delta.pop("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["type"] == "function"
                calls.append([call["id"], call["function"]["name"], ""])
            assert ("id" in call) == ("name" in call["function"]) == (calls[call["index"]][2] == "")
            calls[call["index"]][2] += call["function"]["arguments"]
        for name, text in delta.items():
            said[name] += text
    assert len({call[0] for call in calls}) == len(calls)
    return said["reasoning"], said["content"], [(name, arguments) for _, name, arguments in calls]


class Itself:
    """A decoder of tokens that are their text."""

    def push(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def flush(self) -> str:
        return ""


def parts_of(*, reasoning: bool = True, tools: bool = True, **options: bool) -> AnswerParts:
    return AnswerParts(Itself(), reasoning=reasoning, tools=tools, **options)


@settings(max_examples=50)
@given(TEXTS, CUTS, st.sampled_from([(True, False), (False, True), (True, True)]), st.booleans(), st.booleans())
@example("a</think>b<think>c</think>", [1, 4, 4, 1, 5], (True, False), True, False)  # tokens that begin within tags
def test_any_pieces_give_the_parts_of_the_whole(text, sizes, parsers, thinking, late) -> None:
    options = dict(zip(("reasoning", "tools", "thinking"), (*parsers, thinking and parsers[0]), strict=True))
    *expected, places = oracle(text, **options)
    parts = parts_of(**options)
    deltas, starts, at, waiting = [], [], 0, ""
    for piece in filter(None, cut(text, sizes)):
        waiting += parts.push([piece])
        starts.append(at)
        at += len(piece)
        if not late:  # a stop string may hold text back beyond its token
            deltas.append(parts.split(waiting))
            waiting = ""
    deltas.append(parts.split(waiting, final=True))
    assert joined(deltas) == joined([parts_of(**options).split(text, final=True)]) == tuple(expected)
    assert parts.num_calls == len(expected[2])
    assert parts.reasoning_tokens == len(places & set(starts))


@pytest.mark.parametrize("body", NO_CALLS)
def test_what_is_no_call_stays_text(body: str) -> None:
    for end in ("</tool_call>", ""):
        text = f"<tool_call>{body}{end}"
        assert parts_of().split(text, final=True) == {"content": text}


@pytest.mark.parametrize(("spaces", "arguments"), [(0, '{"a":1}'), (1, '{"a": 1}')])
def test_arguments_are_streamed_where_they_begin_within_the_first_characters(spaces: int, arguments: str) -> None:
    header = '{"name": "f", "arguments":'
    body = header + " " * (HEADER_CHARACTERS - len(header) - 1 + spaces) + '{"a":1}}'
    for pieces in (body, [body]):
        parts = parts_of()
        early = [parts.split(piece) for piece in ("<tool_call>", *pieces)]
        assert joined([*early, parts.split("</tool_call>")]) == ("", "", [("f", arguments)])
        assert any("tool_calls" in delta for delta in early) == (spaces == 0)


def test_only_what_may_become_a_tag_is_held_back() -> None:
    parts = parts_of()
    texts = (
        "text <",
        "t",
        "ea",
        "<think>a</",
        "think>",
        '<tool_call>{"name": "f"',
        ', "arguments": ',
        '{"x": 1',
        "}}",
        "",
    )
    deltas = [parts.split(text) for text in texts]
    nothing = {"content": ""}
    assert deltas[:5] == [{"content": "text "}, nothing, {"content": "<tea"}, {"reasoning": "a"}, nothing]
    assert deltas[5:7] == [nothing] * 2
    assert [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas[7:9]] == ['{"x": 1', "}"]
    assert deltas[8] == {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}
    assert deltas[9] == parts.split("</tool_call>") == parts.split(" ") == nothing
    assert [parts.split(text) for text in ("\na", " b")] == [{"content": "a"}, {"content": " b"}]
