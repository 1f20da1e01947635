"""What sets of known names hold, as their makers count: a damaged or other copy is told at once."""

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


def check_counts(path: Path, **counted: int) -> None:
    """Raise if the folder has the name of a known set and other counts than that."""
    known = _COUNTS.get(path.resolve().name, {})
    for what, number in known.items():
        if counted[what] != number:
            raise DataError(
                f"has {counted[what]:,} {what}, and the set of this name {number:,}: it is not "
                "whole, or another; of another set rename the folder",
                file=path,
            )
