"""A paged engine: scheduler, page allocator, prefix cache, swap, and a contiguous baseline."""

if __name__ == "engine":
    from kernels.checkout_names import share

    share(__name__)
