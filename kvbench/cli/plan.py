"""``kvbench plan``."""

from __future__ import annotations

import click

from kvbench.cli.options import OVERRIDES, PROFILE


@click.command()
@click.argument("workload", type=click.Path())
@PROFILE
@OVERRIDES
def plan(workload: str, profile: str | None, overrides: tuple[str, ...]) -> int:
    """Show what each configuration of WORKLOAD gets for its KV budget: arithmetic only, nothing is launched.

    Bytes a token (scales of a quantised KV among them), pages or reservations, tokens, page-table bytes, how many
    sequences of max_model_len tokens fit at once, and what the swap space holds.

    \b
    Examples:
      kvbench plan workloads/mixed.yaml
      kvbench plan workloads/mixed.yaml -o engine.kv_budget=1GiB
    \b
    Exit codes: 0 printed, 2 a configuration is impossible. No files are written.
    """
    from rich.console import Console

    from kvbench.common.console import print_table
    from kvbench.sweep.capacity import DROP_FIRST, capacity_table
    from kvbench.targets.builtin import check_configuration
    from kvbench.workload.design import capacities, plan_sweep
    from kvbench.workload.file import load_workload

    loaded = load_workload(workload, profile=profile, overrides=overrides)
    design, _ = plan_sweep(loaded, (), check_configuration)
    capacity = capacities(design, check_configuration)
    table, notes = capacity_table(f"{loaded.name}, {loaded.profile} profile", design, capacity)
    console = Console()
    print_table(console, table, drop_first=DROP_FIRST)
    for note in (*notes, *(f"note: {note}" for note in design.notes)):
        console.print(note, highlight=False, markup=False)
    return 0
