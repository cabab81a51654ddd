"""``kvbench plan``."""

from __future__ import annotations

from typing import Any

import click

from kvbench.cli.options import ANSWER_OPTIONS, OVERRIDES, PROFILE, add_options, workload_of


@click.command()
@click.argument("workload", required=False, type=click.Path())
@add_options(*ANSWER_OPTIONS)
@PROFILE
@OVERRIDES
def plan(workload: str | None, profile: str | None, overrides: tuple[str, ...], **answers: Any) -> int:
    """Show what each configuration of WORKLOAD gets for its KV budget, and whether its loads fit into that.

    Arithmetic only, nothing is launched. Bytes a token (scales of a quantised KV among them), pages or reservations,
    tokens, page-table bytes, how many sequences of max_model_len tokens fit at once, and what the swap space holds;
    then, for each load, whether memory limits it.

    \b
    Examples:
      kvbench plan workloads/mixed.yaml
      kvbench plan workloads/mixed.yaml -o engine.kv_budget=1GiB
      kvbench plan --input-len 600 --output-len 150 --concurrency 20 --vary kv_cache_dtype=auto,fp8
    \b
    Exit codes: 0 printed, 2 a configuration is impossible. No files are written.
    """
    from rich.console import Console

    from kvbench.common.console import print_table
    from kvbench.sweep.capacity import DROP_FIRST, capacity_table, memory_notes
    from kvbench.sweep.plan import preflight
    from kvbench.targets.builtin import check_configuration
    from kvbench.workload.design import plan_sweep

    loaded = workload_of(workload, answers, profile=profile, overrides=overrides)
    design, _ = plan_sweep(loaded, (), check_configuration)
    known = preflight(loaded, design, check_configuration)
    table, notes = capacity_table(f"{loaded.name}, {loaded.profile} profile", design, known.capacity)
    console = Console()
    print_table(console, table, drop_first=DROP_FIRST)
    notes = (*notes, *(f"note: {note}" for note in design.notes))
    for note in (*notes, *memory_notes(design, known.capacity, known.lengths)):
        console.print(note, highlight=False, markup=False)
    return 0
