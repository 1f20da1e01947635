"""What sets of known names hold, as their makers count: a damaged or other copy is told at once."""

from collections.abc import Mapping
from pathlib import Path

from click_data.errors import DataError

_COUNTS = {
    "mind_small_5k": {"rows": 189_359, "requests": 5_000, "positives": 7_542, "users": 4_637},
    "trivago_val100k": {"rows": 312_539, "requests": 13_597, "positives": 13_596, "users": 6_593},
    "ebnerd_sample": {"rows": 10_848, "requests": 1_046, "positives": 1_047, "users": 38},
    "lastfm_s3rec": {"rows": 52_551, "users": 1_090, "items": 3_646},
    "AmazonElectronics_x1": {"rows": 2_993_570, "users": 192_403},
    "TaobaoAd_x1": {"rows": 25_029_426},
    "KuaiVideo_x1": {"rows": 13_661_383, "users": 10_000},
    "MicroVideo1.7M_x1": {"rows": 12_737_617, "users": 10_986},
}


def check_counts(name: str, counted: Mapping[str, int], path: Path) -> None:
    """Raise if what is to have the name of a known set has other counts than that."""
    for what, number in _COUNTS.get(name, {}).items():
        if counted.get(what, number) != number:
            raise DataError(
                f"has {counted[what]:,} {what}, and {name} is published with {number:,}: it is "
                f"not whole, or another set, which --name calls by another name",
                file=path,
            )
