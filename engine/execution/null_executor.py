"""An executor that computes nothing, for replays of the real scheduler, pool, prefix cache and swap without tensors.

Its tokens depend only on the seed, the request, the sibling and the position, so a replay is the same on every machine,
Python and hash seed, and preemption changes no token. No torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from kvbench_engine.model.spec import ModelInfo
from kvbench_engine.scheduling.step_plan import Computed, Draw, StepPlan
from kvbench_engine.sequence import Drawn, Sequence

_WORD = 2**64 - 1


def mixed(*parts: int) -> int:
    """Hash whole numbers to 64 bits: splitmix64's finaliser (Steele et al. 2014) over one after another."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = ((state ^ part) + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state


def name_number(name: str) -> int:
    """Hash a name; the same in every process, unlike ``hash``."""
    return zlib.crc32(name.encode())


class ReplayExecutor:
    """An executor whose tokens are hashes, from 0 to ``vocab_size`` - 1.

    The first ``num_eos`` ids end a sequence that does not ignore EOS.

    ``on_launch``, if set, is called with each plan before it is committed, when a step holds most memory.
    """

    def __init__(self, seed: int, vocab_size: int, num_eos: int = 1):
        self.seed = seed
        self.model_info = ModelInfo("replay", vocab_size, None, tuple(range(num_eos)), None)
        self.phase_seconds: dict[str, float] = {}
        self.on_launch: Callable[[StepPlan], None] | None = None

    def launch(self, plan: StepPlan) -> Computed:
        if self.on_launch is not None:
            self.on_launch(plan)
        return Computed([self._draw(item.seq) if item.samples else None for item in plan.scheduled])

    def _draw(self, seq: Sequence) -> Draw:
        if seq.num_candidates:
            return self._continuations(seq)
        if not seq.pending_forks and not seq.silent:
            return self._token(seq, seq.index)
        tokens = tuple(self._token(seq, seq.index + i) for i in range(seq.pending_forks + 1))
        # multiples of 1/8: sums of them are exact, in any order, on any machine
        return Drawn(tokens, tuple(-0.125 * (token % 8) - 0.125 for token in tokens) if seq.silent else ())

    def _token(self, seq: Sequence, index: int) -> int:
        """The next token of ``seq`` or of its sibling ``index``. Pending tokens count for the position."""
        bits = mixed(self.seed, name_number(seq.request_id), index, len(seq.token_ids))
        return bits % self.model_info.vocab_size

    def _continuations(self, seq: Sequence) -> Drawn:
        """A beam's best continuations, best first. Their scores depend on its last token, so that beams are dropped and
        forked.
        """
        vocab = self.model_info.vocab_size
        bits = mixed(self.seed, name_number(seq.request_id), seq.token_ids[-1], len(seq.token_ids))
        count = min(seq.num_candidates, vocab)
        worse = (bits >> 32) % 5
        return Drawn(
            tuple((bits + i) % vocab for i in range(count)),
            tuple(-0.125 - 0.375 * i - 0.25 * worse for i in range(count)),
        )
