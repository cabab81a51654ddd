"""The page size of a trace with page ids: told, or found from the lengths."""

from __future__ import annotations

from kvbench.traces.model import MOST_TOKENS

_OPTION = "--page-size"


class PageSize:
    """The page sizes under which every request so far has as many pages as the trace says.

    Traces differ in whether the last page has an id when it is partly filled (Mooncake: yes, WEKA: no), or holds the
    first output token (Bailian). So ``n`` ids stand for ``n`` or ``n - 1`` full pages of the prompt.

    Args:
        asked: what the user says. told: what the file says. usual: the format's own, used where the lengths leave a
            choice that includes it.
    """

    def __init__(self, asked: int | None, told: int | None = None, usual: int | None = None):
        self.given = asked or told
        self.source = _OPTION if asked else "the trace's block_size"
        self.usual = usual
        self.low, self.high = (self.given, self.given) if self.given else (1, MOST_TOKENS)

    def add(self, pages: int, tokens: int) -> None:
        """Narrow down. Raises ValueError when nothing is left."""
        low = max(self.low, tokens // (pages + 1) + 1)
        high = min(self.high, tokens // (pages - 1)) if pages > 1 else self.high
        if low <= high:
            self.low, self.high = low, high
            return
        if self.given:
            wanted = -(-tokens // self.given)
            way_out = "leave it out to have it found" if self.source == _OPTION else "mend or remove the request"
            raise ValueError(
                f"{pages} page ids for {tokens} tokens, but at {self.source} {self.given} there would be {wanted}: "
                + way_out
            )
        raise ValueError(
            f"{pages} page ids for {tokens} tokens, which fits no page size that fits the requests before it "
            f"({self._span()} tokens): mend or remove the request"
        )

    def choose(self, path: object) -> tuple[int, str]:
        """The page size and how it is known: given, the only one that fits, the format's own, or a power of two.

        Raises ValueError when the lengths leave a choice.
        """
        if self.given:
            return self.given, f"given by {self.source}"
        if self.low == self.high:
            return self.low, "found: the only one that fits every length"
        if self.usual and self.low <= self.usual <= self.high:
            return self.usual, f"the format's own; the lengths would fit {self._span()} tokens"
        powers = [2**k for k in range(MOST_TOKENS.bit_length()) if self.low <= 2**k <= self.high]
        if len(powers) == 1:
            return powers[0], f"guessed: the only power of two among the {self._span()} tokens that the lengths fit"
        raise ValueError(
            f"the page size of {path} cannot be told from its lengths, which {self._span()} tokens would fit: give it "
            f"with {_OPTION} (in a workload: load.prompts.page_size)"
        )

    def _span(self) -> str:
        if self.low == self.high:
            return str(self.low)
        return f"{self.low} or more" if self.high == MOST_TOKENS else f"{self.low} to {self.high}"
