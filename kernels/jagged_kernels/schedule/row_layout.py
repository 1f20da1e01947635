"""What a row of a schedule's tables is, in which order rows stand, and how many there are.

Below `rows`, which says what stands in them, and `triton_rows`, which writes it.
"""

from __future__ import annotations

# Fields of a row, int32; padded to 8 so that a row is one 32-byte sector.
ROW_FIELDS = ("tile_start", "tile_end", "range_start", "range_end", "shift", "user", "length")
ROW_WIDTH = 8

NO_LIMIT = -1

# Tokens of a user up to which kernels of their own take it (`plain.short`).
SHORT_USER = 32

# Users are sorted by the tokens that they see at most, in steps of COST_UNIT and above 8 of them
# in quarters of an octave: enough to start the long ones first, and few enough to sort by counting.
# Those of up to SHORT_USER tokens come last.
COST_UNIT = 64
COST_BUCKETS = 32
MOST_UNITS = 511


def row_counts(
    q_tokens: int, k_tokens: int, users: int, *, tile_q: int, tile_k: int, sort: bool
) -> tuple[int, int]:
    """Rows of queries and of keys: bounds of the number of tiles that the host knows."""
    return q_tokens // tile_q + users if sort else users, k_tokens // tile_k + users
