"""What a KV cache holds, as text: in tokens, and in bytes where they are known."""

from __future__ import annotations

import pytest

from kvbench.report.provenance import kv_capacity
from kvbench.runs.results import Capacity


@pytest.mark.parametrize(
    ("capacity", "text"),
    [
        ({"capacity_tokens": 6144, "bytes_per_token": 16384}, "6,144 tokens, 96 MiB"),
        # What the server says of its bytes wins over the arithmetic.
        (
            {"capacity_tokens": 6400, "bytes_per_token": 16384, "kv_bytes": 50 << 20, "kv_type": "f16"},
            "6,400 tokens, 50 MiB of f16",
        ),
        ({"capacity_tokens": 6144}, "6,144 tokens"),
        ({"kv_budget_bytes": 1 << 20}, ""),
    ],
)
def test_a_capacity_is_shown_in_tokens_and_bytes(capacity, text):
    assert kv_capacity(Capacity.parse(capacity)) == text
