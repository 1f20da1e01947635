"""Published test scores, to be shown beside our own where data, split and negatives are theirs.

They are facts of their papers, given by name of the data set; a log of the same name that is
another one has to be prepared under another name.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """scores: by model and metric. source: who, and where."""

    source: str
    scores: dict[tuple[str, str], float]


# The results that the repository of S3-Rec prints for LastFM: 99 given negatives, and all items.
_S3_REC = {
    "sasrec": {"hr@10": 0.4706, "ndcg@10": 0.2755, "mrr": 0.2364},
    # its counts hold the test items
    "popularity_leak": {"hr@10": 0.3037, "ndcg@10": 0.1687, "mrr": 0.1506},
}
_S3_REC_ALL = {
    "sasrec": {"all_hr@10": 0.0688, "all_ndcg@10": 0.0390},
    "popularity_leak": {"all_hr@10": 0.0440, "all_ndcg@10": 0.0203},
}

PUBLISHED = {
    "lastfm_s3rec": Published(
        "Zhou et al., S3-Rec, CIKM 2020",
        {
            (model, metric): value
            for table in (_S3_REC, _S3_REC_ALL)
            for model, row in table.items()
            for metric, value in row.items()
        },
    ),
}
