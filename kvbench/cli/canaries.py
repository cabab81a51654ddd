"""``kvbench canaries``."""

from __future__ import annotations

from pathlib import Path

import click

from kvbench.cli.options import OutputFile
from kvbench.common.errors import UsageError, as_usage_error


@click.command()
@click.argument("model")
@click.option("--output", type=OutputFile(), required=True, metavar="FILE", help="Where the canaries go (JSONL).")
@click.option("--passkeys", type=click.IntRange(0, 1000), default=64, show_default=True, help="How many passkeys.")
@click.option("--copies", type=click.IntRange(0, 1000), default=32, show_default=True, help="How many copies.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of all that is drawn.")
@click.option("--dtype", default="auto", show_default=True, help="Of weights and KV, as the engine's setting.")
@click.option("--device", default="auto", show_default=True, help="As the engine's setting.")
def canaries(model: str, output: Path, passkeys: int, copies: int, seed: int, dtype: str, device: str) -> int:
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
      kvbench canaries models/Llama-3.1-8B --output llama.jsonl
      kvbench canaries kvbench-tiny --output workloads/canaries/kvbench-tiny.jsonl

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

    console = Console()
    if not passkeys + copies:
        raise UsageError("0 passkeys and 0 copies are no canaries: ask for at least one")
    with as_usage_error():
        config = EngineConfig(model=model, layout="contiguous", dtype=dtype, device=device)
        if uses_random_weights(find_model(model), "auto"):
            raise ValueError(f"model {model!r} has no weights to answer with: give a folder with *.safetensors")
        with status_line(console, "loading") as status:
            made, dropped = make_canaries(config, passkeys=passkeys, copies=copies, seed=seed, say=status)
        if not made.canaries:
            raise ValueError(f"model {model!r} surely knows none of the answers: it is too weak for canaries")
    write_canaries(output, made)
    for kind, asked in (("passkey", passkeys), ("copy", copies)):
        kept = sum(canary.kind == kind for canary in made.canaries)
        print_plain(console, f"{kind}: {kept} of {asked}; {dropped.get(kind, 0)} drawn and dropped")
    print_plain(console, f"written: {output}")
    return 0
