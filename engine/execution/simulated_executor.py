"""An executor without tensors that moves a virtual clock by the times of a cost model.

Scheduler, pool, prefix cache and swap are the engine's own. Its tokens depend on the token before alone, so equal
prompts get equal answers, as greedy ones do. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvbench_engine.counters import PHASES
from kvbench_engine.execution.null_executor import ReplayExecutor
from kvbench_engine.kv.manager import MoveKind
from kvbench_engine.scheduling.step_plan import Draw, StepHandle, StepPlan
from kvbench_engine.sequence import Sequence


class VirtualClock:
    """Seconds that pass only when ``now`` is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class StepWork(NamedTuple):
    """The work of one step, computed and moved.

    prefills: for each chunk of a prompt its tokens, and the tokens before it whose KV it reads
    decodes: sequences that compute one token
    decode_context: tokens whose KV they read, summed over them; longest_decode: of the longest of them
    drawn: sequences that draw a token
    copied, swapped_out, swapped_in: slots
    """

    prefills: tuple[tuple[int, int], ...]
    decodes: int
    decode_context: int
    longest_decode: int
    drawn: int
    copied: int = 0
    swapped_out: int = 0
    swapped_in: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.decodes + sum(count for count, _ in self.prefills)


def work_of(plan: StepPlan) -> StepWork:
    """The work of a plan that is not committed yet."""
    prefills: list[tuple[int, int]] = []
    decodes = context = longest = drawn = 0
    for seq, num_tokens in plan.scheduled:
        computed = seq.num_computed
        if computed + num_tokens == len(seq.token_ids):
            drawn += 1
        if num_tokens == 1:
            decodes += 1
            context += computed + 1
            if computed >= longest:
                longest = computed + 1
        else:
            prefills.append((num_tokens, computed))
    if not plan.moves:
        return StepWork(tuple(prefills), decodes, context, longest, drawn)
    moved = dict.fromkeys(MoveKind, 0)
    for move in plan.moves:
        moved[move.kind] += move.num_slots
    return StepWork(tuple(prefills), decodes, context, longest, drawn,
                    moved[MoveKind.COPY], moved[MoveKind.SWAP_OUT], moved[MoveKind.SWAP_IN])  # fmt: skip


class StepTime(NamedTuple):
    """Seconds of a step in the phases of ``counters.PHASES`` and in ``move``; ``total``: of the whole step.

    ``total`` is less than their sum where they overlap.
    """

    total: float
    schedule: float = 0.0
    prepare: float = 0.0
    execute: float = 0.0
    sample: float = 0.0
    output: float = 0.0
    move: float = 0.0


class SimulatedExecutor(ReplayExecutor):
    """An executor that takes the time of ``step_time``, the cost model, on a virtual clock.

    clock: a launch moves it to the end of its step. With ``pipelined``, which the engine's ``async_scheduling`` needs,
    only reading a step's tokens does: the device begins a step when it has done the one before and the host has
    planned this one, so that the host's phases cost time only where they are longer than a step of the device.

    ``num_eos`` of ``ReplayExecutor`` is 0: an answer ends at its ``max_tokens``.
    """

    def __init__(
        self,
        vocab_size: int,
        step_time: Callable[[StepWork], StepTime],
        clock: VirtualClock,
        *,
        pipelined: bool = False,
    ):
        super().__init__(0, vocab_size, num_eos=0)
        self.phase_seconds = {"move": 0.0, **dict.fromkeys(PHASES, 0.0)}
        self._step_time, self._clock, self._vocab_size = step_time, clock, vocab_size
        self._pipelined, self._device_free = pipelined, 0.0

    def rewind(self) -> None:
        """Sets the clock back to 0 between two loads; nothing may be running."""
        self._clock.now = self._device_free = 0.0

    def launch(self, plan: StepPlan) -> StepHandle:
        taken = self._step_time(work_of(plan))
        for phase, seconds in zip(StepTime._fields[1:], taken[1:], strict=True):
            if seconds:
                self.phase_seconds[phase] += seconds
        self.phase_seconds["prepare"] += taken.move  # which counts it as well
        if not self._pipelined:
            self._clock.now += taken.total
            return super().launch(plan)
        host = taken.schedule + taken.prepare + taken.output
        self._clock.now += host
        self._device_free = max(self._clock.now, self._device_free) + taken.total - host
        if self.on_launch is not None:
            self.on_launch(plan)
        return _InFlight(self, [item.seq if item.samples else None for item in plan.scheduled], self._device_free)

    def read(self, drawing: list[Sequence | None], ended: float) -> list[Draw]:
        """The tokens of a step that the device ends at ``ended`` [s]."""
        self._clock.now = max(self._clock.now, ended)
        return [None if seq is None else self._draw(seq) for seq in drawing]

    def _draw(self, seq: Sequence) -> Draw:
        if seq.num_candidates or seq.pending_forks or seq.silent:
            return super()._draw(seq)
        return (seq.token_ids[-1 - seq.num_pending] + 1) % self._vocab_size

    def _token(self, seq: Sequence, index: int) -> int:
        return (seq.token_ids[seq.num_known - 1] + 1 + index) % self._vocab_size


class _InFlight(NamedTuple):
    """A step that the device computes; ``drawing``: the sequences that draw a token."""

    executor: SimulatedExecutor
    drawing: list[Sequence | None]
    ended: float

    def tokens(self) -> list[Draw]:
        return self.executor.read(self.drawing, self.ended)
