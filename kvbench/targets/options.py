"""The options that say which server is measured: one that runs already, or one that is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.common.options import Count, Existing, Options, option, switch

_SERVER = "The server"


@dataclass(frozen=True, kw_only=True)
class RunningServerOptions(Options, heading=_SERVER, rare=True):
    """The options about a server that runs already."""

    preset: str | None = option(
        "What kind of server it is: vllm, sglang, tgi, llamacpp or transformers (default: OpenAI's API as vLLM "
        "speaks it).",
        metavar="NAME",
    )
    model: str | None = option(
        "The model's name at a running server (default: the first it lists); for `kvbench dev mock-server` with a "
        "query, as mock?ttft_ms=20.",
        metavar="NAME",
    )
    vocab_size: Count | None = option(
        "The model's vocabulary, if a running server does not say it, or to use less: vocab_size in its config.json."
    )
    max_model_len: Count | None = option(
        "The longest request, if a running server does not say it, or to use less: max_position_embeddings in "
        "config.json."
    )
    tokenizer: Existing | None = option(
        "Send a running server texts, made with the tokenizer.json in DIR (default: token ids; where the server takes "
        "none, texts of the tokenizer that ships).",
        metavar="DIR",
    )
    api_key_env: str | None = option("The environment variable that holds a running server's key.", metavar="NAME")
    tls_ca_file: Existing | None = option("With https://: the certificates to trust.")
    no_tls_verify: bool = switch("With https://: trust any certificate.")


@dataclass(frozen=True, kw_only=True)
class TargetOptions(RunningServerOptions, heading=_SERVER):
    """The options that choose what is measured; None or empty: not given.

    ``vary``, ``port``, ``only``: as `kvbench sweep` declares them; another command has none of them.
    """

    target: str | None = option(
        "Launch vllm, sglang, tgi, llamacpp or transformers with the workload's settings (what it cannot do is skipped "
        "with the reason); or measure an OpenAI-compatible server that runs already, as it is.",
        metavar="NAME|URL",
    )
    serve_cmd: str | None = option(
        "Launch this command instead. {port}, {model}, {page_size} and other settings in braces are filled in; each "
        "setting that is varied needs one. Without any: it takes the built-in server's flags.",
        metavar="CMD",
    )
    exact: bool = switch(
        "Refuse a baseline that the launched target cannot have. Otherwise the nearest one is measured, and what "
        "differs is said here, in the manifest and in the report.",
        rare=True,
    )
    target_python: str | None = option(
        "The Python that has the package of --target NAME; for llamacpp and tgi, the program (llama-server).",
        metavar="PATH", rare=True,
    )  # fmt: skip
    target_args: str | None = option(
        "More words for the command line of a launched target.", metavar="WORDS", rare=True
    )
    start_timeout: float | None = option(
        "Seconds until a launched server must be ready (default: 180; 900 for other engines, which may compile first).",
        least=1, rare=True,
    )  # fmt: skip
    vary: Sequence[str] = ()
    port: int | None = None
    only: Sequence[str] = ()
