"""The real server as a process, with a tiny model and a pool that is always full."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.http_server import ServerClient
from tests.support.soak_plan import MAX_MODEL_LEN, MAX_NUM_SEQS, VOCAB

ROOT = Path(__file__).parents[2]
PAGE_SIZE, PAGES, MAX_NUM_WAITING = 4, 96, 20
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.5,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SLOT_BYTES = (32 + 32) * 4
TABLE_BYTES = MAX_NUM_SEQS * -(-MAX_MODEL_LEN // PAGE_SIZE) * 8
INT8_SLOT_BYTES = 2 * (32 + 4)  # codes and a float32 scale, of K and of V
SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "num-threads": 1,
    "page-size": PAGE_SIZE,
    "max-model-len": MAX_MODEL_LEN,
    "max-num-seqs": MAX_NUM_SEQS,
    "max-num-batched-tokens": 64,
    "max-num-waiting": MAX_NUM_WAITING,
    "scheduling-policy": "priority",
}


def memory_flags(slot_bytes: int, swap: bool) -> tuple[str, ...]:
    """``PAGES`` pages on the device and, to swap to, an eighth as many on the host, so that it fills too."""
    slots = PAGES * PAGE_SIZE
    budget = ("--kv-budget", str(slots * slot_bytes + TABLE_BYTES))
    if not swap:
        return (*budget, "--preemption-mode", "recompute")
    return (*budget, "--preemption-mode", "swap", "--swap-space", str(slots // 8 * slot_bytes))


@dataclass(frozen=True)
class SoakServer(ServerClient):
    pid: int

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@contextlib.contextmanager
def soak_server(folder: Path, *flags: str, check: bool = False) -> Iterator[SoakServer]:
    """Serves until the block ends; ``check`` asserts the engine's invariants after every step."""
    model = folder / "tiny-llama.json"
    model.write_text(json.dumps(MODEL))
    command = [sys.executable, "-m", "engine.server", "--model", str(model), "--port", "0"]
    for name, value in SETTINGS.items():
        command += [f"--{name}", str(value)]
    command += flags  # the last of two wins
    env = {**os.environ, "KVBENCH_CHECK": "1" if check else "0"}
    log = folder / "server.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        ready = process.stdout.readline()
        assert ready.startswith("ready "), log.read_text()
        yield SoakServer(int(ready.rsplit(":", 1)[1]), process.pid)
        process.terminate()
        assert process.wait(10) == 0, log.read_text()
        said = [line for line in log.read_text().splitlines() if not line.startswith("loading ")]  # the phases
        assert said == [], "the server complained"
    finally:
        process.kill()
        process.communicate()
