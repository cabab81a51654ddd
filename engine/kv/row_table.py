"""Rows of the page table and the counts that both layouts keep alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.kv.budget import KVCapacity
from engine.kv.moves import Move
from engine.sequence import Sequence
from engine.stats import KVCounters


class RowTable:
    """Rows of the page table, handed to resident sequences, and what both layouts count."""

    def __init__(self, max_num_seqs: int, capacity: KVCapacity):
        self.capacity = capacity
        self.counters = KVCounters()
        self.page_table = np.zeros((max_num_seqs, capacity.max_pages_per_seq), dtype=np.int64)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._moves: list[Move] = []
        self._used_slots = 0  # slots that hold a token of a resident sequence, shared ones counted once
        self._resident_tokens = 0  # computed tokens of all resident sequences

    def take_moves(self) -> list[Move]:
        moves, self._moves = self._moves, []
        return moves

    def read_counters(self) -> KVCounters:
        return replace(self.counters)

    def _take_row(self, seq: Sequence) -> None:
        assert seq.row < 0 and not seq.pages, f"{seq.request_id} is admitted already"
        seq.row = self._free_rows.pop()

    def _return_row(self, seq: Sequence) -> None:
        self._free_rows.append(seq.row)
        self._resident_tokens -= seq.num_computed
        seq.row = -1
        seq.num_computed = 0

    def _check_rows(self, sequences: list[Sequence]) -> None:
        rows = [seq.row for seq in sequences if seq.row >= 0]
        assert sorted(rows + self._free_rows) == list(range(len(self.page_table))), "rows are lost or shared"
        assert sum(seq.num_computed for seq in sequences) == self._resident_tokens
        for seq in sequences:
            assert (seq.row >= 0) == bool(seq.pages) or not seq.num_computed, "KV without a row"
