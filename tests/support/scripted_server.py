"""``python -m engine.server`` with an engine that computes nothing, for tests of the process around it.

python tests/support/scripted_server.py [the server's flags]      SCRIPTED_STEP_S: seconds a step takes
"""

from __future__ import annotations

import os
import sys

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.spec import ModelInfo
from engine.server.__main__ import exit_now, run
from engine.server.arguments import build_parser
from engine.server.tokenizer import ServerTokenizer
from tests.support.fake_engine import fake_engine


def load(config: EngineConfig) -> Engine:
    return fake_engine(step_s=float(os.environ.get("SCRIPTED_STEP_S", "0.01")))


def no_tokenizer(config: EngineConfig, model: ModelInfo) -> ServerTokenizer:
    return ServerTokenizer("none")


if __name__ == "__main__":
    exit_now(run(build_parser().parse_args(sys.argv[1:]), load, no_tokenizer))
