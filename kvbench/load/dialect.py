"""A request of a load as its server takes it: which API, which fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from kvbench.common.schema import StrictModel
from kvbench.load.endpoints import ENDPOINTS, Endpoint, Fields
from kvbench.requests.request import ANSWERS, RequestSpec
from kvbench.workload.request_form import EndpointName, check_extra_body

_FINISHED = ("length", "stop", "eos", "eos_token", "stop_sequence", "tool_calls", "function_call")


class Dialect(StrictModel):
    """The things that a server's API takes and sends. The defaults are those of vLLM and of the built-in server.

    ``endpoint``: which of ``ENDPOINTS`` the load is sent to.
    ``done_marker``: streams end with the API's end mark. ``stream_options``: ``stream_options.include_usage`` is sent.
    ``usage``: the server reports usage (without it, output tokens are the streamed ids, else the chunks with
    content). ``token_id_prompts``: a prompt may be a list of token ids (else its text is sent). ``ignore_eos``: the
    field of that name is understood and sent. ``return_token_ids``: likewise. ``max_completion_tokens``: that field
    takes the place of ``max_tokens``. ``temperature``: the field is sent; ``api_fields``: likewise
    those of the endpoint. ``extra_body``: merged into each
    request's JSON.
    ``answers``: those of n, best_of and beam_width that a request may have. ``returns_all_beams``: n must be that
    width.
    ``keep_alive``: a connection may carry several requests; False for a server that closes it without saying so.
    ``finish_reasons``: those of a stream that came to its end; any other (abort, error, timeout) is a failure.
    """

    endpoint: EndpointName = "completions"
    done_marker: bool = True
    stream_options: bool = True
    usage: bool = True
    token_id_prompts: bool = True
    ignore_eos: bool = True
    return_token_ids: bool = True
    max_completion_tokens: bool = False
    temperature: bool = True
    api_fields: bool = True
    answers: list[str] = Field(default_factory=lambda: [*ANSWERS])
    returns_all_beams: bool = False
    keep_alive: bool = True
    finish_reasons: list[str] = Field(default_factory=lambda: [*_FINISHED])
    extra_body: Annotated[Fields, AfterValidator(check_extra_body)] = Field(default_factory=dict)

    @property
    def api(self) -> Endpoint:
        """The row of its endpoint."""
        return ENDPOINTS[self.endpoint]

    def at(self, endpoint: str) -> Dialect:
        """The same server's at another endpoint, without what that does not have."""
        return self.model_copy(update={"endpoint": endpoint, **ENDPOINTS[endpoint].lacks})

    def refusal(self, answers: Mapping[str, int | None]) -> str | None:
        """Says why the server cannot be asked for ``answers`` (n, best_of and beam_width); None if it can."""
        wanted = {name: value for name, value in answers.items() if value and (value > 1 or name == "beam_width")}
        if unknown := [name for name in wanted if name not in self.answers]:
            return f"it has no {' and no '.join(unknown)}"
        beams = wanted.get("beam_width", 1)
        if self.returns_all_beams and beams > wanted.get("n", 1):
            return f"it returns all {beams} beams, so n must be {beams}"
        return None

    def body(self, model: str, request: RequestSpec, temperature: float) -> Fields:
        """The fields of a request, without those of a stream."""
        limit = "max_completion_tokens" if self.max_completion_tokens else self.api.limit
        fields = {"model": model, **self.api.prompt(request), limit: request.max_tokens}
        fields |= self.api.fields if self.api_fields else {}
        return fields | ({"temperature": temperature} if self.temperature else {}) | self.extra_body

    def streamed_body(self, model: str, request: RequestSpec, temperature: float, ignore_eos: bool) -> Fields:
        """The fields of a request whose answer is streamed."""
        fields = self.body(model, request, temperature) | {"stream": True, **_answers(request)}
        if self.ignore_eos:
            fields["ignore_eos"] = ignore_eos
        if self.stream_options:
            fields["stream_options"] = {"include_usage": True}
        if self.return_token_ids:
            fields["return_token_ids"] = True
        return fields | self.extra_body


OPENAI = Dialect()


def _answers(request: RequestSpec) -> Fields:
    """The fields of the sequences drawn and returned, in vLLM's names: ``best_of`` also counts the beams."""
    fields: Fields = {"n": request.n} if request.n > 1 else {}
    if request.beam_width is not None:
        fields |= {"use_beam_search": True, "temperature": 0.0}  # which samples nothing
    if request.width > request.n:
        fields["best_of"] = request.width
    return fields
