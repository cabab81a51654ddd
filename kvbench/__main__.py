"""``python -m kvbench`` is ``kvbench``."""

from kvbench.cli.main import main

if __name__ == "__main__":
    main()
