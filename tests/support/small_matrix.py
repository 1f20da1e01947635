"""Every kernel on small batches: what `make sanitize` runs under compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/support/small_matrix.py [PART ...]
    compute-sanitizer --tool racecheck python tests/support/small_matrix.py --without-hopper

Results are checked elsewhere; here a tool looks at every access to memory. A test
(`test_small_matrix.py`) sees that no kernel of the package is left out. Without a GPU, and
with TRITON_INTERPRET=1 in the environment, all but Hopper's kernels run in the interpreter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import matrix_attention
import matrix_hopper
import matrix_operations
import torch


def _named(*parts: Callable[[], None]) -> dict[str, Callable[[], None]]:
    return {part.__name__: part for part in parts}


# Racecheck does without the kernels for Hopper.
WITHOUT_HOPPER = _named(*matrix_attention.PARTS, *matrix_operations.PARTS)
PARTS = WITHOUT_HOPPER | _named(*matrix_hopper.PARTS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Every kernel on small batches.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--without-hopper", action="store_true", help="none of Hopper's kernels")
    arguments = parser.parse_args()
    for name in arguments.parts or (WITHOUT_HOPPER if arguments.without_hopper else PARTS):
        PARTS[name]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print("done:", name, flush=True)


if __name__ == "__main__":
    main()
