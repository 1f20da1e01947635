"""`python -m jagged_ranking`, which is the `jagged` command: torchrun starts modules."""

import sys

from jagged_ranking.cli import main

if __name__ == "__main__":
    sys.exit(main())
