"""``python -m kvbench`` is ``kvbench``."""

from kvbench.cli import main

if __name__ == "__main__":
    main()
