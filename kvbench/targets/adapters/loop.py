"""Lets an adapter's engine compute steps on command: ``PYTHON loop.py ADAPTER.py [ARGUMENTS...]``.

It speaks protocol 3 (docs/engines.md) on stdin and stdout. The engine's own Python runs it, so it needs the standard
library only. The adapter's file has a class ``Engine``:

    __init__(self, settings, arguments)  builds it; raises ValueError with a sentence for what it cannot do
    describe(self)                       returns what it says of itself
    add(self, name, prompt, max_tokens, temperature, ignore_eos, **options)
    step(self)                           computes one step; returns [(name, sequence, token ids, finish reason or None)]
    OPTIONS                              of a request, that ``add`` takes, of n, best_of, beam_width and priority
    GREEDY_ONLY                          whether it decodes greedily and to the length only (default: no)
    cached_tokens(self, name)            of a request that has ended (default: not told)
    reset_cache(self)                    empties the prefix cache (default: there is none)
    wait(self)                           until the device has done a step's work (default: ``step`` waits)
    metrics(self)                        Prometheus text (default: empty)
"""

import importlib.util
import json
import operator
import os
import sys
import time
import traceback


class SentRequest:
    """A request that was sent: when it was due and sent [s], its tokens, and what its sequences ended with."""

    def __init__(self, due, sent, sequences, prompt_tokens):
        self.due, self.sent, self.sequences, self.prompt_tokens = due, sent, sequences, prompt_tokens
        self.times, self.counts, self.owners = [], [], []
        self.ids = {}  # by sequence
        self.ends = {}  # by sequence: the finish reason

    @property
    def ended(self):
        return len(self.ends) == self.sequences


class Load:
    """The requests of an engine's present load, and its clock [s]: the sum of its steps, and of its idle waits."""

    def __init__(self, engine, requests, concurrency, temperature, ignore_eos):
        self.engine, self.waiting, self.users = engine, list(requests), concurrency
        self.sampling = {"temperature": temperature, "ignore_eos": ignore_eos}
        self.clock, self.sent = 0.0, []
        self.running = {}  # those of the sent requests that have not ended, by name

    @property
    def ended(self):
        return len(self.sent) == len(self.waiting) and not self.running

    def turn(self, most):
        """Computes up to ``most`` steps: [seconds, prompt tokens, sequences that go on, output tokens] of each."""
        steps = []
        while len(steps) < most and not self.ended:
            if not self.running and self.users is None:  # idle until the next arrival
                self.clock = max(self.clock, self.waiting[len(self.sent)][2])
            started = time.perf_counter()
            self._send_due()
            outputs = self.engine.step()
            if hasattr(self.engine, "wait"):
                self.engine.wait()
            seconds = time.perf_counter() - started
            self.clock += seconds
            steps.append([seconds, *self._take(outputs)])
        return {"steps": steps, "clock": self.clock, "ended": self.ended}

    def _send_due(self):
        while len(self.sent) < len(self.waiting):
            prompt, max_tokens, arrival, priority, *options = self.waiting[len(self.sent)]
            if arrival > self.clock if self.users is None else len(self.running) >= self.users:
                return
            more = {**(options[0] if options else {}), **({"priority": priority} if priority else {})}
            if unknown := sorted(set(more) - set(getattr(self.engine, "OPTIONS", ()))):
                raise ValueError(f"its requests cannot have {', '.join(unknown)}")
            name, due = str(len(self.sent)), arrival if self.users is None else self.clock
            self.engine.add(name, prompt, max_tokens, **self.sampling, **more)
            self.running[name] = SentRequest(due, self.clock, more.get("n", 1), len(prompt))
            self.sent.append(self.running[name])

    def _take(self, outputs):
        """Notes new tokens as of now; returns prompt tokens, sequences that go on, and output tokens of the step.

        An engine does not tell which prompts a step computed: a prompt counts where its first token is made.
        """
        prefill = decode = made = 0
        for output in outputs:
            name, sequence, ids, reason = self._checked(output)
            request = self.running[name]
            if ids:
                prefill += 0 if request.times else request.prompt_tokens
                decode += sequence in request.ids
                made += len(ids)
                request.times.append(self.clock)
                request.counts.append(len(ids))
                request.owners.append(sequence)
                request.ids.setdefault(sequence, []).extend(ids)
            if reason is not None:
                request.ends[sequence] = reason
                if request.ended:
                    del self.running[name]
        return prefill, decode, made

    def _checked(self, output):
        """One output of a step, its ids as whole numbers. Raises ValueError with what is wrong in it."""
        try:
            name, sequence, ids, reason = output
            ids = [operator.index(token) for token in ids]
        except (TypeError, ValueError):
            expected = "(name, sequence, [token ids], reason or None) is expected"
            raise ValueError(f"step gave {output!r}: {expected}") from None
        if name not in self.running or sequence not in range(self.running[name].sequences):
            raise ValueError(f"step gave tokens of request {name!r}, sequence {sequence!r}, which does not run")
        if reason is not None and not isinstance(reason, str):
            raise ValueError(f"step gave the finish reason {reason!r}: 'length', 'stop' or None is expected")
        return name, sequence, ids, reason

    def result(self):
        """The row of each request: [due, sent, times, tokens at each, cached tokens, finish reason, token ids]."""
        cached = getattr(self.engine, "cached_tokens", lambda name: None)
        rows = []
        for number, request in enumerate(self.sent):
            reason = min(request.ends.values()) if request.ended else None
            ids = [token for sequence in sorted(request.ids) for token in request.ids[sequence]]
            row = [request.due, request.sent, request.times, request.counts, cached(str(number)), reason, ids]
            rows.append(row + [request.owners] * (len(self.waiting[number]) > 4))
        return rows


class LoopCommands:
    """Does what the lines of stdin say, with one engine."""

    def __init__(self, adapter, arguments):
        self.adapter, self.arguments, self.engine, self.load = adapter, arguments, None, None

    def do(self, do, name="", **rest):
        """Returns the answer to a command. Raises ValueError for one that cannot be done."""
        if do == "open":
            if self.engine is not None:
                raise ValueError("this process has its engine: start another process for another engine")
            self.engine = self.adapter.Engine(rest["settings"], self.arguments)
            return self.engine.describe()
        if self.engine is None:
            raise ValueError("no engine is open: open it first")
        metrics = getattr(self.engine, "metrics", str)
        if do == "load":
            if self.load is not None and self.load.running:  # one that was refused is over
                raise ValueError("the engine still computes its last load: let it end first")
            if not rest.pop("keep_cache"):
                getattr(self.engine, "reset_cache", lambda: None)()
            self.load = Load(self.engine, **rest)
            return {"metrics": metrics()}
        if do not in ("turn", "result"):
            raise ValueError(f"there is no command {do!r}: protocol 3 has open, load, turn and result")
        if self.load is None:
            raise ValueError("the engine has no load: give it one first")
        return self.load.turn(rest["steps"]) if do == "turn" else {"requests": self.load.result(), "metrics": metrics()}


def main():
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    path, *arguments = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(path))  # the adapter's folder, as if it were the script
    spec = importlib.util.spec_from_file_location("adapter", path)
    adapter = sys.modules["adapter"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    if not hasattr(adapter, "Engine"):
        sys.exit(f"{path} has no class Engine")
    done = LoopCommands(adapter, arguments)
    tells = [name for name in ("cached_tokens", "metrics") if hasattr(adapter.Engine, name)]
    answer = {
        "protocol": 3,
        "options": list(getattr(adapter.Engine, "OPTIONS", ())),
        "tells": tells,
        "greedy_only": bool(getattr(adapter.Engine, "GREEDY_ONLY", False)),
    }
    text = json.dumps(answer)
    while True:
        answers.write(text + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            return
        try:
            text = json.dumps(done.do(**json.loads(line)))
        except Exception as error:  # whatever an engine raises, its process goes on
            traceback.print_exc()
            words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            text = json.dumps({"error": words})


if __name__ == "__main__":
    main()
