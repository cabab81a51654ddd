"""The checks of `kvbench check-engine`: the engine of docs/engines.md passes, each lie fails at its own point."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kvbench.cli.main import cli
from kvbench.common.errors import UsageError
from kvbench.lockstep import process
from kvbench.lockstep.conformance import FAILED, NOT_OFFERED, PASSED, check_engine
from kvbench.lockstep.process import EngineProcess
from kvbench.targets.preset import LOOP

PAGE = Path(__file__).resolve().parents[3] / "docs" / "engines.md"
ANSWERS_TWICE = """
class Two(Engine):
    OPTIONS = ("n",)

    def __init__(self, settings, arguments):
        super().__init__(settings, arguments)
        self.answers, self.cached, self.seen = {}, {}, set()

    def describe(self):
        told = super().describe()
        told["engine"] |= {"enable_prefix_caching": True, "page_size": 4}
        return told

    def add(self, name, prompt, max_tokens, temperature, ignore_eos, n=1):
        super().add(name, prompt, max_tokens, temperature, ignore_eos)
        self.answers[name], self.cached[name] = n, len(prompt) if tuple(prompt) in self.seen else 0
        self.seen.add(tuple(prompt))

    def step(self):
        return [(name, i, *rest) for name, _, *rest in super().step() for i in range(self.answers[name])]

    def cached_tokens(self, name):
        return self.cached[name]

    def reset_cache(self):
        self.seen.clear()


Engine = Two
"""
LIAR = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("loop", {loop!r})
loop = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loop)

class Liar(loop.LoopCommands):
    loads = 0
    def do(self, do, name="", **rest):
        self.loads += do == "load"
        {before}
        answer = super().do(do, name, **rest)
        {after}
        return answer

loop.LoopCommands = Liar
loop.main()
"""
CLOCK, WALL = "Its clock is the sum of its steps", "Its seconds are those of the wall"
TOKENS, MOMENTS = "Its steps have as many tokens as its requests", "Its tokens come at the ends of steps"
EQUAL, ARRIVALS = "Equal requests make equal steps and tokens", "Arrivals are by its clock"
REFUSALS, CACHE = "What it cannot do is answered with an error", "Its prefix cache is kept and emptied"
LIES = {  # what it does: where it must be found
    "if do == 'turn': answer['clock'] *= 1.0001": CLOCK,
    "if do == 'turn': answer['steps'] = [[0.0, *s[1:]] for s in answer['steps']]": CLOCK,
    "if do == 'turn': answer['steps'] = [[3 * s[0], *s[1:]] for s in answer['steps']]; answer['clock'] *= 3": WALL,
    "if do == 'turn': answer['steps'] = [[s[0] / 3, *s[1:]] for s in answer['steps']]; answer['clock'] /= 3": WALL,
    "if do == 'turn' and answer['ended']: answer['steps'][-1][3] += 1": TOKENS,
    "if do == 'result': answer['requests'][0][5] = 'stop'": TOKENS,
    "if do == 'result': answer['requests'][0][6][0] = 1000": TOKENS,
    "if do == 'result': answer['requests'][1][2][1] += 1e-4": MOMENTS,
    "if do == 'result' and self.loads > 1: answer['requests'][2][6][0] += 1": EQUAL,
}


WAITS = """

class Engine(Engine):
    steps, waits = 0, []

    def step(self):
        self.steps += 1
        return super().step()

    def wait(self):
        self.waits.append(str(self.steps))

    def metrics(self):
        return " ".join(self.waits)
"""


@pytest.fixture
def checked(tmp_path):
    """Checks an engine of the page with more code behind it; ``before`` and ``after``: lines of a loop that lies."""

    def run(more: str = "", before: str = "pass", after: str = "pass"):
        (code,) = re.findall(r"```python\n# my_engine\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
        engine, loop = tmp_path / "my_engine.py", tmp_path / "liar.py"
        engine.write_text(code + more)
        loop.write_text(LIAR.format(loop=str(LOOP), before=before, after=after))
        lies = (before, after) != ("pass", "pass")
        command = [sys.executable, str(loop if lies else LOOP), str(engine)]
        return {result.title: result for result in check_engine(command, {}, tmp_path / "log")}

    return run


def test_the_engine_of_the_page_passes_and_what_it_lacks_is_not_offered(checked):
    outcomes = [result.outcome for result in checked().values()]
    assert outcomes.count(PASSED) == 9 and outcomes.count(NOT_OFFERED) == 2 and FAILED not in outcomes


def test_what_is_optional_is_checked_where_it_is_offered(checked):
    results = checked(ANSWERS_TWICE)
    assert {result.outcome for result in results.values()} == {PASSED}
    assert len(results) == 11


def test_the_device_is_waited_for_after_each_step(tmp_path):
    (code,) = re.findall(r"```python\n# my_engine\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_engine.py").write_text(code + WAITS)
    with EngineProcess([sys.executable, str(LOOP), str(tmp_path / "my_engine.py")], tmp_path / "log") as process:
        process.greet()
        process.ask(do="open", name="a", settings={})
        process.ask(
            do="load", name="a", requests=[[[1], 12, None, 0]], concurrency=1, temperature=0.0, ignore_eos=True,
            keep_cache=True,
        )  # fmt: skip
        for steps in (1, 4):
            process.ask(do="turn", name="a", steps=steps)
        assert process.ask(do="result", name="a")["metrics"] == "1 2 3 4 5"


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_fails_at_its_own_point(checked, lie):
    failed = [result for result in checked(after=lie).values() if result.outcome == FAILED]
    assert failed and failed[0].title.startswith(LIES[lie]) and failed[0].detail


@pytest.mark.parametrize(("before", "more", "title"), [
    ("if do == 'load': rest['requests'] = [[*r[:2], r[2] and 1.0, *r[3:]] for r in rest['requests']]", "", ARRIVALS),
    ("if do == 'load': rest['concurrency'] = rest['concurrency'] and 3", "", MOMENTS),
    ("if do == 'no-such-command': return {}", "", REFUSALS),
    ("if do == 'load': rest['keep_cache'] = True", ANSWERS_TWICE, CACHE),
    ("if do == 'load': rest['keep_cache'] = False", ANSWERS_TWICE, CACHE),
])  # fmt: skip
def test_what_the_engine_gets_wrong_fails_at_its_own_point(checked, before, more, title):
    failed = [result.title for result in checked(more, before=before).values() if result.outcome == FAILED]
    assert failed and failed[0].startswith(title)


@pytest.mark.parametrize(("before", "words"), [
    ("if do == 'turn': sys.exit(3)", "exit code 3"),
    ("if do == 'turn': time.sleep(60)", "did not answer within"),
    ("if do == 'open': return {}", "vocab_size"),
    ("if do == 'turn': return {'clock': 1}", "not as the protocol has it"),
    ("if do == 'turn': return {'error': 'no room'}", "no room"),
])  # fmt: skip
def test_a_process_that_dies_hangs_or_says_something_else_is_named(checked, monkeypatch, before, words):
    monkeypatch.setattr(process, "TURN_LIMIT_S", 0.5)
    results = checked(before=before).values()
    assert [result for result in results if result.outcome == FAILED and words in result.detail]


@pytest.mark.parametrize(("output", "words"), [
    ("('nobody', 0, [1], None)", "request 'nobody', sequence 0, which does not run"),
    ("('-1', 0, [1], None)", "request '-1'"),
    ("(name, 3, [1], None)", "sequence 3, which does not run"),
    ("(name, 0, [1.5], None)", "is expected"),
    ("(name, 0, [1])", "is expected"),
    ("(name, 0, [1], True)", "finish reason True"),
])  # fmt: skip
def test_what_a_step_gives_wrongly_is_one_sentence_and_the_rest_is_not_reached(checked, output, words):
    more = f"\nstep = Engine.step\nEngine.step = lambda self: [{output} for name, *_ in step(self)]\n"
    *_, last = checked(more).values()
    assert last.outcome == FAILED and words in last.detail and "Traceback" not in last.detail


def test_a_longer_turn_than_asked_for_fails(checked):
    results = checked(before="if do == 'turn': rest['steps'] += 1")
    assert "a turn of 1 steps had 2" in next(r.detail for r in results.values() if r.outcome == FAILED)


def test_the_command_prints_a_table_and_its_exit_code_says_whether_a_point_failed(tmp_path, capsys):
    (code,) = re.findall(r"```python\n# my_engine\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    engine = tmp_path / "my_engine.py"
    engine.write_text(code)
    assert cli.main(["check-engine", str(engine), "--settings", "max_num_seqs=2"], standalone_mode=False) == 0
    assert "can be measured in engine time" in capsys.readouterr().out
    assert cli.main(["check-engine", str(engine), "--settings", "max_num_seqs=0"], standalone_mode=False) == 1
    assert "1 to 256 are possible" in capsys.readouterr().out.replace("\n", " ")


def test_a_file_without_an_engine_and_a_log_without_a_place_are_said(tmp_path, capsys):
    (tmp_path / "empty.py").write_text("")
    assert cli.main(["check-engine", str(tmp_path / "empty.py")], standalone_mode=False) == 1
    assert "has no class Engine" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UsageError, match="cannot be written"):
        cli.main(["check-engine", str(tmp_path / "empty.py"), "--log", str(tmp_path)], standalone_mode=False)


@pytest.mark.parametrize("command", ["no-such-engine.py", "no-such-program x", "'", ""])
def test_a_command_that_cannot_run_is_refused(command):
    with pytest.raises(UsageError):
        cli.main(["check-engine", command], standalone_mode=False)
