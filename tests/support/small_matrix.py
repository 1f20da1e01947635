"""Every kernel on small batches: what `make sanitize` runs under compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/support/small_matrix.py [PART ...]

Results are checked elsewhere; here a tool looks at every access to memory.
`tests/kernels/test_small_matrix.py` sees that no kernel of the package is left out, and that those
for Hopper are in parts of their own. Without a GPU, TRITON_INTERPRET=1 runs all others in Triton's
interpreter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import matrix_attention
import matrix_hopper
import matrix_operations
import torch

Parts = dict[str, Callable[[], None]]


def _named(*parts: Callable[[], None]) -> Parts:
    return {part.__name__: part for part in parts}


HOPPER = _named(*matrix_hopper.PARTS)
WITHOUT_HOPPER = _named(*matrix_attention.PARTS, *matrix_operations.PARTS)
PARTS = HOPPER | WITHOUT_HOPPER


def main() -> None:
    parser = argparse.ArgumentParser(description="Every kernel on small batches.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="by default all")
    parser.add_argument("--without-hopper", action="store_true", help="all but Hopper's kernels")
    parser.add_argument("--names", action="store_true", help="run nothing, print the parts")
    options = parser.parse_args()
    for name in options.parts or (WITHOUT_HOPPER if options.without_hopper else PARTS):
        if not options.names:
            PARTS[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        print(name if options.names else f"done: {name}", flush=True)


if __name__ == "__main__":
    main()
