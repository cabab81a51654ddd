"""The canaries of a load that were answered wrongly, and whether those are more than its KV dtype explains. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench.metrics.model import CanaryCounts

if TYPE_CHECKING:
    import pandas as pd

WRONG_ANSWERS = "wrong_answers.jsonl"  # beside requests.parquet, where there are any
ALPHA = 0.001  # of cells that answer as well as offline, those that fail
FEWEST_CANARIES = 20  # different ones, all right: then fewer than 15 % are wrong, at 95 % (3 / n)


def counted(requests: pd.DataFrame) -> CanaryCounts | None:
    """Counts the canaries among the rows of requests.parquet, of one load or several; None without any."""
    if "canary" not in requests or not len(rows := requests[requests["canary"].notna()]):
        return None
    answered = rows[rows["ok"].astype(bool)]
    wrong = answered[answered["canary_wrong"].notna()].sort_values("t0", kind="stable")
    distinct, first = int(answered["canary"].nunique()), {}
    if len(wrong):
        due = wrong.iloc[0]
        first["first_wrong"] = f"{due['canary']} (request {due['index']}), {due['canary_wrong']}"
    return CanaryCounts(sent=len(rows), answered=len(answered), wrong=len(wrong), distinct=distinct, **first)


def wrong_words(canaries: CanaryCounts) -> str:
    """Writes `2 of 40 canaries were answered wrongly, first passkey-7 (request 12), from token 3 on: 17 4, not 9`."""
    was = "was" if canaries.wrong == 1 else "were"
    return f"{canaries.wrong} of {canaries.answered} canaries {was} answered wrongly, first {canaries.first_wrong}"


def chance_of_so_many(wrong: int, answered: int, distinct: int, offline_wrong: int, offline_asked: int) -> float:
    """The probability of so many wrong answers or more, if the server answers as well as the idle engine offline.

    One-sided exact test of two proportions (Fisher, Journal of the Royal Statistical Society 98, 1935): given how many
    are wrong on both sides together, how likely are so many of them in the load? The answers to one canary are no
    independent ones, so a load that asks ``distinct`` canaries several times counts as that many, with its own share of
    wrong ones.
    """
    if not wrong:
        return 1.0
    from scipy.stats import hypergeom  # slow to import

    so_many = max(1, wrong * distinct // answered)
    return float(hypergeom.sf(so_many - 1, offline_asked + distinct, offline_wrong + so_many, distinct))
