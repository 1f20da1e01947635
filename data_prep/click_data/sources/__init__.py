"""Where click logs come from: one module each, and the registry of them."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from click_data.events import ClickLog
from click_data.sources import (
    ebnerd,
    impressions,
    kuairand,
    log,
    mind,
    movielens,
    reczoo,
    sequences,
    synthetic,
    yambda,
)


@dataclass(frozen=True)
class Source:
    """A way to get a log.

    options: a dataclass of what can be chosen. load(path, options, seed) gives the checked log;
    path is None exactly if not needs_path.
    """

    name: str
    summary: str
    origin: str
    licence: str
    needs_path: bool
    options: type[Any]
    load: Callable[[Path | None, Any, int], ClickLog]

    @property
    def option_names(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.options))


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            name="synthetic",
            summary="a small made-up click log with planted interests, the default everywhere",
            origin="made here from a seed; nothing to download",
            licence="none needed: it holds no real data",
            needs_path=False,
            options=synthetic.SyntheticOptions,
            load=synthetic.load,
        ),
        Source(
            name="log",
            summary="your own click log: user_id, item_id, timestamp, optionally label, category",
            origin="a .parquet, .csv or .tsv file, or a folder of Parquet files",
            licence="whatever yours is",
            needs_path=True,
            options=log.LogOptions,
            load=log.load,
        ),
        Source(
            name="movielens",
            summary="MovieLens ratings; a positive is a rating of at least --threshold",
            origin="a folder, zip or ratings file of GroupLens, or the same as Parquet",
            licence="research use; most sets may not be redistributed: read each set's README",
            needs_path=True,
            options=movielens.MovieLensOptions,
            load=movielens.load,
        ),
        Source(
            name="impressions",
            summary="lists as they were shown, with the clicks and the histories before them",
            origin="a folder with impressions.parquet, interactions.parquet or histories.parquet, "
            "and perhaps items.parquet",
            licence="whatever yours is",
            needs_path=True,
            options=impressions.ImpressionOptions,
            load=impressions.load,
        ),
        Source(
            name="sequences",
            summary="what users did in order, the last items held out",
            origin="a folder with interactions.parquet, and perhaps test.parquet with negatives "
            "and items.parquet",
            licence="whatever yours is",
            needs_path=True,
            options=sequences.SequenceOptions,
            load=sequences.load,
        ),
        Source(
            name="mind",
            summary="MIND, the Microsoft news data set: behaviors.tsv and news.tsv",
            origin="a folder with train and dev of msnews.github.io, or one of them",
            licence="non-commercial research, no redistribution: read Microsoft's licence",
            needs_path=True,
            options=mind.MindOptions,
            load=mind.load,
        ),
        Source(
            name="ebnerd",
            summary="EB-NeRD, the Ekstra Bladet news data set: behaviors.parquet, history.parquet",
            origin="a folder with train and validation of recsys.eb.dk, or one of them",
            licence="research use: read the terms at recsys.eb.dk",
            needs_path=True,
            options=ebnerd.EbnerdOptions,
            load=ebnerd.load,
        ),
        Source(
            name="reczoo",
            summary="AmazonElectronics_x1, TaobaoAd_x1, KuaiVideo_x1 or MicroVideo1.7M_x1",
            origin="a folder with train.csv and test.csv of reczoo on huggingface.co",
            licence="research use: read the terms of each set's origin",
            needs_path=True,
            options=reczoo.ReczooOptions,
            load=reczoo.load,
        ),
        Source(
            name="yambda",
            summary="Yambda, listens of Yandex Music; a positive is a track played to --threshold",
            origin="a folder with listens.parquet, as flat/50m of yandex/yambda on huggingface.co",
            licence="Apache 2.0",
            needs_path=True,
            options=yambda.YambdaOptions,
            load=yambda.load,
        ),
        Source(
            name="kuairand",
            summary="KuaiRand, videos shown in a feed, with clicks, likes, follows and more",
            origin="a folder with log_standard_*.csv of kuairand.com",
            licence="CC BY-SA 4.0",
            needs_path=True,
            options=kuairand.KuaiRandOptions,
            load=kuairand.load,
        ),
    )
}
