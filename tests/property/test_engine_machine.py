"""Hypothesis drives the real scheduler, managers and pool through add, step, abort and reset on pools so small that
everything collides, and compares every finished output with the same request run alone."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.engine_parts import request, small_engine, undisturbed


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(["paged", "paged", "paged", "contiguous"]),
        page_size=st.sampled_from([1, 2, 3, 4, 8]),
        spare=st.integers(0, 40),
        caching=st.booleans(),
        chunked=st.booleans(),
    )
    def start(self, layout, page_size, spare, caching, chunked):
        per_page = 32 if layout == "contiguous" else page_size
        self.engine = small_engine(
            -(-32 // per_page) * per_page + spare // per_page * per_page,
            layout=layout,
            page_size=page_size,
            enable_prefix_caching=caching and layout == "paged",
            enable_chunked_prefill=chunked,
            max_num_batched_tokens=6 if chunked else 32,
        )
        self.requests, self.tokens, self.finished = {}, {}, {}
        self.aborted: set[str] = set()

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=24), max_tokens=st.integers(1, 12))
    def add(self, prompt, max_tokens):
        # three token values only: prefixes meet all the time
        one = request(str(len(self.requests)), prompt, max_tokens=max_tokens)
        self.requests[one.request_id] = one
        self.engine.add_request(one)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self._step()

    @rule(data=st.data())
    def abort(self, data):
        if self.requests:
            name = data.draw(st.sampled_from(sorted(self.requests)))
            if self.engine.abort(name):
                self.aborted.add(name)

    @rule()
    def reset(self):
        done = self.engine.reset_prefix_cache()
        assert done == (self.engine.stats().kv.pages_owned == 0)
        if done:
            assert self.engine.stats().kv.pages_cached == 0

    def _step(self):
        seen: set[str] = set()
        for output in self.engine.step():
            assert output.request_id not in seen
            seen.add(output.request_id)
            assert output.request_id not in self.aborted
            assert output.request_id not in self.finished
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                self.finished[output.request_id] = output.finish_reason
        self.engine.check_integrity()

    @invariant()
    def accounts_balance(self):
        if hasattr(self, "engine"):
            kv = self.engine.stats().kv
            assert kv.pages_free + kv.pages_owned + kv.pages_cached == kv.pages_total
            assert 0 <= kv.slots_used <= kv.slots_reserved <= kv.slots_total
            self.engine.check_integrity()

    def teardown(self):
        """Every admitted request ends, with the tokens it would have had alone; an idle engine owns nothing."""
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work():
                break
            self._step()
        assert not self.engine.has_work(), "livelock"
        assert self.engine.stats().kv.pages_owned == 0
        left = {name: one for name, one in self.requests.items() if name not in self.aborted}
        assert left.keys() == self.finished.keys()
        alone = undisturbed(list(left.values()))
        for name, one in left.items():
            limit = 32 - len(one.prompt_token_ids)
            assert self.tokens[name] == alone[name][:limit]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
