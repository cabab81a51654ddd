"""Verdicts made by hand, of every kind and outcome, for the tests of what CI sees of them."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter

from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Finding, Moved, Verdict

HOSTILE = (
    "<b>x</b> | `y` *z* [l](http://e) @all #1 $a$ \\ \x00\x1b[31m\x08\ud800\x9b\ufffe\n"
    "## head ]]> &amp; \U0001f680 %0A::"
)
AGAIN = "kvbench compare a b --workload w.yaml"


def read(folder: Path) -> Verdict:
    """The verdict in ``folder``/verdict.json."""
    return TypeAdapter(Verdict).validate_json((folder / "verdict.json").read_bytes())


def timing(
    cell: str = "overall",
    outcome: str = PASS,
    change: float = 0.002,
    *,
    metric: str = "p95_itl_ms",
    unit: str = "ms",
    higher: bool = False,
    floor: float = 0.02,
    margin: float = 0.03,
    series: tuple[float, ...] | None = None,
    suite: str = "overall",
) -> Finding:
    """One hypothesis of the timing gate with eight pairs around ``change``."""
    pairs = tuple(change + step / 1000 for step in (-9, 4, 0, 7, -3, 2, -5, 4)) if series is None else series
    return Finding(
        id=f"{cell}/{metric}",
        suite=suite,
        title=f"{metric}, {cell}",
        outcome=outcome,
        sentence=f"{metric} of {cell} changed by {change:+.1%}",
        metric=metric,
        unit=unit,
        higher_is_better=higher,
        base=20.0,
        candidate=20.0 * (1 + change),
        change=change,
        interval=(change - 0.009, change + 0.009),
        p=0.0039 if outcome == FAIL else 0.4,
        figures={"floor": floor, "margin": margin, "smallest_detectable": 0.018, "pairs_needed": 12},
        series=pairs,
    )


def failed() -> Verdict:
    """Decode 10 % slower, everything else level."""
    cells = [f"mixed/paged-p{size}-c8" for size in (8, 16, 32)]
    return Verdict(
        kind="compare",
        outcome=FAIL,
        sentence="decode got 10.1 % slower: p95 ITL +10.1 % [9.2, 11.0] in every cell; 8 pairs",
        findings=(
            *(
                timing(cell, PASS, suite="cell", metric="output_throughput", unit="tokens/s", higher=True)
                for cell in cells
            ),
            timing(cells[0], INCONCLUSIVE, 0.031, metric="p95_ttft_ms", suite="cell"),
            *(timing(cell, FAIL, 0.09 + i / 100, suite="cell") for i, cell in enumerate(cells)),
            timing("overall", FAIL, 0.101),
        ),
        base={"name": "main", "sha": "0123456789abcdef0123", "command": "kvbench serve"},
        candidate={"name": "HEAD", "sha": "fedcba98765432100000", "command": "kvbench serve"},
        moved=(
            Moved("decode_ms", "decode time a step", cells[0], "ms", 12.0, 14.04, 0.17, (0.16, 0.18), 0.91),
            Moved("prefill_ms", "prefill time a step", cells[0], "ms", 5.0, 5.1, 0.02, (0.01, 0.03), 0.05),
            Moved("preemptions", "preemptions", cells[1], "", 0.0, 3.0, None),
        ),
        reproduce="kvbench compare 0123456 fedcba9 --workload workloads/mixed.yaml --seed 7 --max-minutes 60",
        notes=("the base was built with another compiler",),
        facts={"pairs": 8, "looks": [8], "minutes": 21.5, "machine": {"cpu": "x", "cores": 2}},
    )


def passed() -> Verdict:
    findings = (timing(), timing("mixed/a", suite="cell"))
    return Verdict("compare", PASS, "no metric is worse than its margin; 8 pairs", findings, reproduce=AGAIN)


def inconclusive() -> Verdict:
    sentence = "p95 TTFT is undecided: the smallest detectable effect is 6.1 %; 20 pairs are needed"
    findings = (timing("overall", INCONCLUSIVE, 0.031), timing("mixed/a", suite="cell"))
    return Verdict("compare", INCONCLUSIVE, sentence, findings, reproduce=AGAIN)


def invalid() -> Verdict:
    """Of the limits gate: two measured nothing that counts."""
    finding = Finding("limit/slo", "limit", "p95 TTFT of mixed/a", INVALID, "the load was not driven: 12 % late")
    held = Finding(
        "limit/memory", "limit", "peak memory", PASS, "1,024 of 2,048 MiB", unit="MiB", candidate=1024.0,
        figures={"max": 2048.0, "kld": float("nan")},
    )  # fmt: skip
    return Verdict("limits", INVALID, "1 of 2 limits could not be checked", (finding, held), reproduce="kvbench gate r")


def empty() -> Verdict:
    return Verdict("compare", EMPTY, "no cell is in both", reproduce=AGAIN)


def counters() -> Verdict:
    """Of the counter gate, with a history that parts at a step."""
    finding = Finding(
        "paged-p16-swap/preemptions", "counters", "preemptions of paged-p16-swap", FAIL,
        "1 more preemption than locked (4 instead of 3); the histories part at step 118", metric="num_preemptions",
        base=3.0, candidate=4.0, change=1 / 3, details=("step 118: preempted [] -> [7]", "copied pages 12 -> 13"),
    )  # fmt: skip
    same = Finding("paged-p8/preemptions", "counters", "preemptions of paged-p8", PASS, "all as locked")
    commands = {"reproduce": "kvbench gate counters workloads/ci_counters.yaml"}
    commands["accept"] = 'kvbench accept counters --reason "..."'
    return Verdict("counters", FAIL, "1 of 2 scenarios differs", (same, finding), **commands)


def hostile() -> Verdict:
    """Names with all that Markdown, HTML, XML, a terminal and a workflow command could stumble over."""
    finding = Finding(
        HOSTILE, HOSTILE, HOSTILE, FAIL, HOSTILE, metric=HOSTILE, unit=HOSTILE, higher_is_better=True, base=1.0,
        candidate=0.5, change=-0.5, interval=(-0.6, -0.4), p=0.001, figures={HOSTILE: 1.0, "floor": 0.01},
        details=(HOSTILE, "```"), series=(-0.5, -0.6, float("nan"), -0.4),
    )  # fmt: skip
    moved = Moved(HOSTILE, HOSTILE, HOSTILE, HOSTILE, 0.0, 1.0, None)
    side = {"name": HOSTILE, HOSTILE: HOSTILE}
    command = f"kvbench '{HOSTILE}' ```"
    return Verdict("compare", FAIL, HOSTILE, (finding,), side, side, (moved,), command, HOSTILE, (HOSTILE,), side)


def huge(count: int = 3_000) -> Verdict:
    """Many findings with long names and sentences."""
    outcomes = (FAIL, INCONCLUSIVE, PASS)
    findings = tuple(
        timing(f"mixed/{'long-' * 30}{i}", outcomes[i % 3], 0.05 + i / 10_000, suite="cell") for i in range(count)
    )
    moved = tuple(Moved(f"m{i}", "step " * 40, "cell " * 40, "ms", 1.0, 2.0, 1.0, share=0.1) for i in range(count))
    return Verdict("compare", FAIL, "all is slower", findings, moved=moved, reproduce="kvbench compare a b")


EVERY = {make.__name__: make for make in (failed, passed, inconclusive, invalid, empty, counters, hostile)}
