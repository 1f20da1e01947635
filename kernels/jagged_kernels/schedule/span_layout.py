"""What a span of a partition is: below `partition` and the kernels that write and read spans."""

from __future__ import annotations

# Fields of a span, int32; four, so that a span is one 16-byte load.
SPAN_FIELDS = ("row", "block", "pieces")
SPAN_WIDTH = 4
