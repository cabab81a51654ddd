"""The sequences of one request: forking, which are still running, what is returned in the end."""

from __future__ import annotations

from kvbench_engine.scheduling.beam import BeamSearch
from kvbench_engine.scheduling.scheduler import Scheduler
from kvbench_engine.sequence import Drawn, Request, Sequence, TokenOutput


class Group:
    """One request. ``live``: its sequences in the engine, by index. ``remaining``: how many of its ``n`` are not done.

    A request that returns only the best of its sequences (best_of, beams) keeps the outputs until all have ended.
    """

    def __init__(self, request: Request, first: Sequence):
        self.request = request
        self.live = {first.index: first}
        self.remaining = request.params.n
        self._ended: list[tuple[float, int, TokenOutput]] = []  # best_of: mean log probability a token, index, output

    @property
    def shown(self) -> bool:
        """Tests whether all its sequences exist and each one's tokens are returned as they come."""
        return not any(seq.silent or seq.pending_forks for seq in self.live.values())

    @property
    def unfinished(self) -> list[int]:
        """Indices of the outputs that the request still waits for."""
        return sorted(self.live) if self.shown else list(range(self.request.params.n))

    def fork(self, parent: Sequence, scheduler: Scheduler) -> list[Sequence]:
        """Fork the siblings that ``parent`` is to have; returns all of them, ``parent`` first."""
        siblings = [parent.fork(index + 1) for index in range(scheduler.claim_forks(parent))]
        for child in siblings:
            scheduler.fork(parent, child)
            self.live[child.index] = child
        return [parent, *siblings]

    def ended(self, seq: Sequence, output: TokenOutput) -> list[TokenOutput]:
        """Note that ``seq`` has ended with ``output``; the outputs to return now."""
        del self.live[seq.index]
        if not seq.silent:
            self.remaining -= 1
            return [output]
        tokens = tuple(seq.token_ids[seq.num_prompt :])
        whole = TokenOutput(seq.request_id, tokens, output.finish_reason, seq.num_cached)
        self._ended.append((seq.logprob / len(tokens), seq.index, whole))
        if self.live:
            return []
        # ties: the lower index, because the order of ending depends on preemptions
        best = sorted(self._ended, key=lambda entry: (-entry[0], entry[1]))[: self.remaining]
        self.remaining = 0
        discarded = sum(len(out.token_ids) for *_, out in self._ended) - sum(len(out.token_ids) for *_, out in best)
        return [
            out._replace(index=index, num_discarded=0 if index else discarded) for index, (*_, out) in enumerate(best)
        ]


class BeamGroup(Group):
    """A request with beam search. All beams have the same length; each waits until all have their candidates.

    A beam that is preempted while it waits keeps its candidates and needs no KV until the search advances, so a pool
    that holds a single beam is enough: the beams take turns.
    """

    def __init__(self, request: Request, first: Sequence, max_new_tokens: int, eos_token_ids: frozenset[int]):
        super().__init__(request, first)
        params = request.params
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.search = BeamSearch(params.beam_width, max_new_tokens, ends, params.length_penalty, params.early_stopping)
        first.num_candidates = self.search.num_candidates
        self._beams = [first]  # the search's live beams, in its order
        self._candidates: dict[int, Drawn] = {}  # index -> its best continuations
        self._next_index = 1

    @property
    def num_forks(self) -> int:
        return self._next_index - 1

    def take(self, seq: Sequence, drawn: Drawn, scheduler: Scheduler) -> list[TokenOutput]:
        """Store the candidates of ``seq``; with the last beam's, advance the search or end it."""
        self._candidates[seq.index] = drawn
        seq.blocked = True
        if len(self._candidates) < len(self._beams):
            return []
        chosen = self.search.advance([self._candidates[beam.index] for beam in self._beams])
        self._candidates.clear()
        self._go_on(chosen, scheduler)
        return [] if chosen else self._results(seq)

    def _go_on(self, chosen: list[tuple[int, int]], scheduler: Scheduler) -> None:
        """Drop the beams without a continuation, fork those with several, then append each one's token."""
        before, parents = self._beams, {parent for parent, _ in chosen}
        scheduler.claim_forks(before[0])  # the first beam's, after its first step; none later
        for position, beam in enumerate(before):
            if position not in parents:
                scheduler.finish(beam)  # before any fork, which may need its row
                del self.live[beam.index]
        taken: set[int] = set()
        self._beams = []
        for parent, _ in chosen:
            beam = before[parent]
            if parent in taken:
                beam = self._fork(beam, scheduler)
            taken.add(parent)
            self._beams.append(beam)
        for beam, (_, token) in zip(self._beams, chosen, strict=True):
            beam.token_ids.append(token)
            if beam.blocked:
                scheduler.unblock(beam)

    def _fork(self, parent: Sequence, scheduler: Scheduler) -> Sequence:
        child = parent.fork(self._next_index)
        self._next_index += 1
        scheduler.fork(parent, child)
        self.live[child.index] = child
        return child

    def _results(self, seq: Sequence) -> list[TokenOutput]:
        self.remaining = 0
        return [
            TokenOutput(seq.request_id, hypothesis.token_ids, hypothesis.finish_reason, seq.num_cached, index=index)
            for index, hypothesis in enumerate(self.search.results(self.request.params.n))
        ]
