"""``kvbench dev canaries``."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.common.errors import UsageError, as_usage_error
from kvbench.common.options import Options, OutputFile, argument, option, takes


@dataclass(frozen=True, kw_only=True)
class CanariesRequest(Options):
    """The request of ``kvbench dev canaries``."""

    model: str = argument("MODEL")
    output: OutputFile = option("The file that the canaries go to (JSONL).", required=True, metavar="FILE")
    passkeys: int = option("Draw N passkeys.", default=64, least=0, most=1000)
    copies: int = option("Draw N copies.", default=32, least=0, most=1000)
    seed: int = option("Seed of all that is drawn.", default=0)
    dtype: str = option("The engine's setting dtype, of weights and KV.", default="auto")
    device: str = option("The engine's setting device.", default="auto")


@takes(CanariesRequest)
def canaries(request: CanariesRequest) -> int:
    """Make prompts whose answers MODEL surely knows.

    Loads check the answers of a server with them.

    A passkey hides five digits in text and asks for them; two or three share the text before their keys, and the 64
    have every remainder by 64 as their length, so that their ends meet every place of a page. A copy repeats the
    beginning of a passage that came early, and is to go on with it. Kept are those that contiguous KV in the model's
    own dtype answers rightly, every token at least 0.5 nats likelier than the second likeliest: rounding does not
    change them, so a wrong answer under load is an error.

    MODEL is a folder with weights, or the name of a model that ships.

    \b
    Examples:
      kvbench dev canaries models/Llama-3.1-8B --output llama.jsonl
      kvbench dev canaries kvbench-tiny --output workloads/canaries/kvbench-tiny.jsonl

    \b
    Files written: --output's.
    Exit codes: 0 written, 2 bad input, such as a model that answers none.
    """
    from rich.console import Console

    from engine.config import EngineConfig
    from engine.model.spec import find_model, uses_random_weights
    from kvbench.common.console import print_plain, status_line
    from kvbench.quality.make_canaries import make_canaries
    from kvbench.requests.canaries import write_canaries

    console, model, passkeys, copies = Console(), request.model, request.passkeys, request.copies
    if not passkeys + copies:
        raise UsageError("0 passkeys and 0 copies are no canaries: ask for at least one")
    with as_usage_error():
        config = EngineConfig(model=model, layout="contiguous", dtype=request.dtype, device=request.device)
        if uses_random_weights(find_model(model), "auto"):
            raise ValueError(f"model {model!r} has no weights to answer with: give a folder with *.safetensors")
        with status_line(console, "loading") as status:
            made, dropped = make_canaries(config, passkeys=passkeys, copies=copies, seed=request.seed, say=status)
        if not made.canaries:
            raise ValueError(f"model {model!r} surely knows none of the answers: it is too weak for canaries")
    write_canaries(request.output, made)
    for kind, asked in (("passkey", passkeys), ("copy", copies)):
        kept = sum(canary.kind == kind for canary in made.canaries)
        print_plain(console, f"{kind}: {kept} of {asked}; {dropped.get(kind, 0)} drawn and dropped")
    print_plain(console, f"written: {request.output}")
    return 0
