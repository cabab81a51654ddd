"""An executor without arithmetic: scheduler, pool, prefix cache and swap work for real, and no tensor exists.

What it draws depends on the seed, the request, the sibling and the position alone, so a replay is the same on every
machine, Python and hash seed, and a preempted request goes on with the tokens that it would have had. No torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from engine.model.spec import ModelInfo
from engine.scheduling.step_plan import Computed, StepPlan
from engine.sequence import Drawn, Sequence

_WORD = 2**64 - 1


def mixed(*parts: int) -> int:
    """64 well-mixed bits of whole numbers: the finaliser of splitmix64 (Steele et al. 2014) over one after another."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = ((state ^ part) + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state


def name_number(name: str) -> int:
    """A number for a name, the same in every process: ``hash`` is not."""
    return zlib.crc32(name.encode())


class ReplayExecutor:
    """Token ids run from 0 to ``vocab_size`` - 1; the first ``num_eos`` of them end a sequence that does not ignore it.

    ``on_launch``, when set, is shown each plan before its tokens count as computed: the moment at which a step holds
    most memory.
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

    def _draw(self, seq: Sequence) -> Drawn:
        if seq.num_candidates:
            return self._continuations(seq)
        tokens = tuple(self._token(seq, seq.index + i) for i in range(seq.pending_forks + 1))
        # multiples of 1/8: sums of them are exact, in any order, on any machine
        return Drawn(tokens, tuple(-0.125 * (token % 8) - 0.125 for token in tokens) if seq.silent else ())

    def _token(self, seq: Sequence, index: int) -> int:
        """The token at the end of ``seq``, or of its sibling ``index``. Tokens that are not read yet count as well."""
        bits = mixed(self.seed, name_number(seq.request_id), index, len(seq.token_ids))
        return bits % self.model_info.vocab_size

    def _continuations(self, seq: Sequence) -> Drawn:
        """A beam's best, best first. How good they are depends on its last token: beams are dropped, and forked."""
        vocab = self.model_info.vocab_size
        bits = mixed(self.seed, name_number(seq.request_id), seq.token_ids[-1], len(seq.token_ids))
        count = min(seq.num_candidates, vocab)
        worse = (bits >> 32) % 5
        return Drawn(
            tuple((bits + i) % vocab for i in range(count)),
            tuple(-0.125 - 0.375 * i - 0.25 * worse for i in range(count)),
        )
