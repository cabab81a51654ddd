"""``python -m kvbench_engine.server`` with an engine that computes nothing, for tests of the process around it.

python tests/support/scripted_server.py [the server's flags]      SCRIPTED_STEP_S: seconds a step takes
"""

from __future__ import annotations

import os
import sys

from kvbench_engine.config import EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.model.spec import ModelInfo
from kvbench_engine.server.__main__ import exit_now, run
from kvbench_engine.server.arguments import build_parser
from kvbench_engine.server.tokenizer import ServerTokenizer
from tests.support.fake_engine import fake_engine


def load(config: EngineConfig) -> Engine:
    return fake_engine(step_s=float(os.environ.get("SCRIPTED_STEP_S", "0.01")))


def no_tokenizer(config: EngineConfig, model: ModelInfo) -> ServerTokenizer:
    return ServerTokenizer("none")


if __name__ == "__main__":
    exit_now(run(build_parser().parse_args(sys.argv[1:]), load, no_tokenizer))
