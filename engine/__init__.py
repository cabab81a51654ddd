"""A paged engine: scheduler, page allocator, prefix cache, swap, and a contiguous baseline."""

if __name__ == "engine":
    import runpy
    from pathlib import Path

    runpy.run_path(str(Path(__file__).parents[1] / "kernels" / "checkout_names.py"))["share"](__name__)
