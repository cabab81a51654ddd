"""The event loop answers while the engine's thread is in the middle of a step: it waits for nothing of the engine's."""

from __future__ import annotations

import threading

from engine.scheduling.step_plan import Computed, StepPlan
from tests.support.fake_engine import ScriptedExecutor, fake_engine
from tests.support.http_server import running_server


def test_health_and_models_answer_amid_a_step() -> None:
    """The step ends only when the answers are here; a server that waits for it would never answer."""
    engine = fake_engine()
    began, may_end = threading.Event(), threading.Event()
    scripted: ScriptedExecutor = engine.executor
    launch = scripted.launch

    def held(plan: StepPlan) -> Computed:
        began.set()
        assert may_end.wait(60)
        return launch(plan)

    scripted.launch = held
    with running_server(engine) as server:
        answers = []
        client = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", {"prompt": [5]})))
        client.start()
        try:
            assert began.wait(30)
            for path in ("/health", "/v1/models", "/server_info"):
                assert server.get(path).status == 200
            assert server.post("/tokenize", {"prompt": "to be or not to be"}).json["tokens"]
            assert not answers
        finally:
            may_end.set()
            client.join()
        assert answers[0].status == 200
