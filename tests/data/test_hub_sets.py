"""Sets that their owners publish as files to fetch by hand, in small files of their layouts."""

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from click_data import DataError, open_dataset
from click_data.sources import kuairand, reczoo, yambda
from click_data.sources.kuairand import KuaiRandOptions
from click_data.sources.reczoo import ReczooOptions
from click_data.sources.yambda import YambdaOptions

Command = Callable[..., tuple[int, str, str]]

AMAZON = "label,user_id,item_id,cate_id,item_history,cate_history"
AMAZON_TRAIN = ["1,1,13,6,11^12,6^7", "0,1,16,6,11^12,6^7"]
AMAZON_TRAIN += [
    f"{label},{user},{item},7,11,6" for user in range(1, 12) for label, item in ((1, 12), (0, 15))
]
AMAZON_TEST = ["1,1,14,8,11^12^13,6^7^6", "0,1,15,7,11^12^13,6^7^6", "1,2,15,7,11^12,6^7"]

KUAI = "timestamp,user_id,item_id,is_click,is_like,is_follow,pos_items,neg_items"
_CLICKED = [21, 23, 25, 27, 29]
KUAI_TRAIN = [
    f"0.{n},3,{20 + n},{n % 2},0,0,{'^'.join(map(str, _CLICKED[: n // 2]))},9" for n in range(10)
]
KUAI_TEST = ["1.5,3,40,1,1,0,21^23^25^27^29,9^8", "1.6,4,41,0,0,1,,9"]

TAOBAO = (
    "clk,btag_his,cate_his,brand_his,userid,cms_segid,cms_group_id,final_gender_code,age_level,"
    "pvalue_level,shopping_level,occupation,new_user_class_level,adgroup_id,cate_id,campaign_id,"
    "customer,brand,price,pid,btag"
)
_USER = "1,2,1,3,2,3,0,2"
TAOBAO_TRAIN = [
    f"0,1^1^2,5^6^5,8^9^8,31,{_USER},71,5,1,1,8,19.5,a,1",
    f"1,1^2^4,6^5^5,9^8^8,31,{_USER},72,6,1,1,9,29.5,b,1",
    f"0,,,,32,{_USER},71,5,1,1,8,19.5,a,1",
    *(f"{n % 2},1,5,8,{40 + n},{_USER},72,6,1,1,9,29.5,b,1" for n in range(10)),
]
TAOBAO_TEST = [f"1,2^4^1,5^5^7,8^8^8,31,{_USER},71,5,1,1,8,19.5,b,1"]

MICRO = "user_id,item_id,cate_id,is_click,clicked_items,clicked_categories,timestamp"
MICRO_TRAIN = ["1,52,4,1,51,3,10", "1,53,3,0,51^52,3^4,11", "1,54,3,1,51^52,3^4,12"]
MICRO_TRAIN += [f"2,{60 + n},5,{n % 2},51,3,{n}" for n in range(10)]
MICRO_TEST = ["1,55,9,1,52^54,4^3,20", "2,56,9,0,51,3,21"]


def text(path: Path, header: str, lines: list[str]) -> None:
    path.write_text("\n".join([header, *lines]) + "\n")


def bars(folder: Path, header: str, train: list[str], test: list[str]) -> Path:
    folder.mkdir()
    text(folder / "train.csv", header, train)
    text(folder / "test.csv", header, test)
    return folder


def test_amazon_electronics(tmp_path: Path) -> None:
    folder = bars(tmp_path / "amazon", AMAZON, AMAZON_TRAIN, AMAZON_TEST)
    log = reczoo.load(folder, ReczooOptions(), 0)
    assert log.timed == "none"
    assert log.events.columns == ["user_id", "item_id", "time", "item category"]
    assert log.events.rows()[:6] == [
        *((1, 11, 0, 6), (1, 12, 1, 7), (1, 13, 2, 6), (2, 11, 0, 6), (2, 12, 1, 7), (3, 11, 0, 6))
    ]
    assert log.candidates is not None
    each = log.candidates.group_by("request").agg(
        pl.col("user_id", "prefix", "split").first(), "item_id", "label label"
    )
    each = each.filter(pl.col("user_id") < 3).sort("user_id", "prefix")
    assert each.drop("request").rows() == [
        (1, 1, "train", [12, 15], [1, 0]),
        (1, 2, "train", [13, 16], [1, 0]),
        (1, 3, "test", [14, 15], [1, 0]),
        (2, 1, "train", [12, 15], [1, 0]),
        (2, 2, "test", [15], [1]),
    ]
    # One of ten users' single requests is the tenth of all that is for validation.
    held_out = log.candidates.filter(pl.col("split") == "valid")
    assert held_out.select("user_id", "item_id", "prefix").rows() == [(9, 12, 1), (9, 15, 1)]
    assert log.items is not None
    assert dict(log.items.rows())[13] == 6


def test_kuai_video_has_three_tasks(tmp_path: Path) -> None:
    folder = bars(tmp_path / "kuai", KUAI, KUAI_TRAIN, KUAI_TEST)
    log = reczoo.load(folder, ReczooOptions(), 0)
    assert log.tasks == ("is_click", "is_like", "is_follow")
    assert log.events.rows() == [(3, 21 + 2 * n, n) for n in range(5)]
    assert log.candidates is not None
    test = log.candidates.filter(pl.col("split") == "test")
    assert test.select("user_id", "item_id", "prefix", "^label.*$").rows() == [
        *((3, 40, 5, 1, 1, 0), (4, 41, 0, 0, 0, 1))
    ]
    assert log.candidates["prefix"].to_list()[:10] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    # A tenth of a user's training rows, the last one.
    assert log.candidates["split"].to_list() == ["train"] * 9 + ["valid"] + ["test"] * 2


def test_taobao_histories_are_of_categories_and_brands(
    tmp_path: Path, prepare_command: Command
) -> None:
    folder = bars(tmp_path / "taobao", TAOBAO, TAOBAO_TRAIN, TAOBAO_TEST)
    log = reczoo.load(folder, ReczooOptions(), 0)
    mine = log.events.filter(pl.col("user_id") == 31)
    assert mine["item category"].to_list() == [5, 6, 5, 5, 7]
    assert mine["item brand"].to_list() == [8, 9, 8, 8, 8]
    assert mine["signal btag=4"].to_list() == [0, 0, 0, 1, 0]
    assert mine["item_id"][0] == "category 5 brand 8"
    assert log.candidates is not None
    rows = log.candidates.filter(pl.col("user_id") == 31)
    assert rows.select("split", "prefix", "context pid").rows() == [
        *(("train", 3, "a"), ("train", 4, "b"), ("test", 5, "b"))
    ]
    assert log.items is not None
    assert log.items.columns == [
        *("item_id", "item category", "item brand", "item campaign", "item customer"),
        "dense price",
    ]


def test_micro_video_windows_move(tmp_path: Path) -> None:
    folder = bars(tmp_path / "micro", MICRO, MICRO_TRAIN, MICRO_TEST)
    log = reczoo.load(folder, ReczooOptions(), 0)
    mine = log.events.filter(pl.col("user_id") == 1)
    assert mine["item_id"].to_list() == [51, 52, 54]
    assert mine["item category"].to_list() == [3, 4, 3]
    assert log.candidates is not None
    rows = log.candidates.filter(pl.col("user_id") == 1)
    assert rows.select("split", "prefix").rows()[:3] == [("train", 1), ("train", 2), ("train", 2)]
    assert rows["prefix"].to_list() == [1, 2, 2, 3]


@pytest.mark.parametrize(
    ("name", "header", "train", "test"),
    [
        ("taobao", TAOBAO, TAOBAO_TRAIN, TAOBAO_TEST),
        ("kuai", KUAI, KUAI_TRAIN, KUAI_TEST),
        ("micro", MICRO, MICRO_TRAIN, MICRO_TEST),
        ("amazon", AMAZON, AMAZON_TRAIN, AMAZON_TEST),
    ],
)
def test_from_the_command_to_requests(
    name: str,
    header: str,
    train: list[str],
    test: list[str],
    tmp_path: Path,
    prepare_command: Command,
) -> None:
    folder = bars(tmp_path / name, header, train, test)
    code, said, error = prepare_command("reczoo", "--from", folder, "--out", tmp_path / "out")
    assert (code, error) == (0, "")
    assert said.startswith(name)
    dataset = open_dataset(tmp_path / "out")
    assert sum(dataset.info["counts"]["candidates"].values()) == len(train) + len(test)


@pytest.mark.parametrize(
    ("header", "line", "said"),
    [
        (AMAZON, "2,1,12,7,11,6", "train.csv: column label, line 2: '2' is not a label: 0 or 1"),
        (AMAZON, "1,1,12,7,11^12,6", "column cate_history, line 2: the list has another length"),
        (AMAZON, "1,1,,7,11,6", "train.csv: column item_id, line 2: no id: the value is missing"),
        ("label,user_id,item_id", "1,2,3", "train.csv: not the columns of a set that is known"),
    ],
)
def test_bad_rows_are_refused(header: str, line: str, said: str, tmp_path: Path) -> None:
    folder = bars(tmp_path / "bad", header, [line], [line])
    with pytest.raises(DataError) as caught:
        reczoo.load(folder, ReczooOptions(), 0)
    assert said in str(caught.value)


def test_a_set_without_a_test_is_refused(tmp_path: Path) -> None:
    folder = bars(tmp_path / "bad", AMAZON, AMAZON_TRAIN, AMAZON_TEST)
    (folder / "test.csv").unlink()
    with pytest.raises(DataError, match=r"no test.csv or test.parquet in this folder"):
        reczoo.load(folder, ReczooOptions(), 0)


def listens(folder: Path) -> Path:
    folder.mkdir()
    rows = [
        (n % 3, 1000 + 5 * n, 100 + n % 4, n % 2, (n * 37) % 120, 180 + n % 4) for n in range(40)
    ]
    schema = {
        "uid": pl.UInt32,
        "timestamp": pl.UInt32,
        "item_id": pl.UInt32,
        "is_organic": pl.UInt8,
    }
    schema |= {"played_ratio_pct": pl.UInt16, "track_length_seconds": pl.UInt32}
    pl.DataFrame(rows, schema=schema, orient="row").write_parquet(folder / "listens.parquet")
    return folder


def test_yambda(tmp_path: Path, prepare_command: Command) -> None:
    folder = listens(tmp_path / "50m")
    log = yambda.load(folder, YambdaOptions(), 0)
    assert log.name == "yambda_50m"
    played = log.events["signal played_ratio_pct"]
    assert log.events["label listened"].to_list() == (played >= 50).cast(pl.Int8).to_list()
    assert log.items is not None
    assert dict(log.items.rows()) == {100 + n: 180.0 + n for n in range(4)}
    asked = ("--from", folder, "--out", tmp_path / "out", "--threshold", 90)
    code, _, error = prepare_command("yambda", *asked)
    assert (code, error) == (0, "")
    dataset = open_dataset(tmp_path / "out")
    assert dataset.tasks == ("listened",)
    signals = dataset.histories.signals
    assert ((signals["played_ratio_pct"] >= 90) == signals["listened"]).all()
    with pytest.raises(DataError, match=r"no listens.parquet in this folder"):
        yambda.load(tmp_path, YambdaOptions(), 0)


KUAIRAND = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,"
    "is_hate,long_view,play_time_ms,duration_ms,profile_stay_time,comment_stay_time,"
    "is_profile_enter,is_rand,tab"
)
VIDEOS = (
    "video_id,author_id,video_type,upload_dt,upload_type,visible_status,video_duration,"
    "server_width,server_height,music_id,music_type,tag"
)


def kuairand_1k(folder: Path) -> Path:
    data = folder / "data"
    data.mkdir(parents=True)
    for name, first in (("4_08_to_4_21", 0), ("4_22_to_5_08", 20)):
        lines = [
            f"{n % 3},{n % 5},20220408,1500,{1_649_400_000_000 + 60_000 * n},{n % 2},"
            f"{int(n % 4 == 1)},0,0,0,0,{n % 2},{1500 * n},9000,0,0,0,0,{n // 2 % 3}"
            for n in range(first, first + 20)
        ]
        text(data / f"log_standard_{name}_1k.csv", KUAIRAND, lines)
    text(data / "log_random_4_22_to_5_08_1k.csv", KUAIRAND, ["x"])
    videos = [
        "0,70,NORMAL,2022-04-01,Web,1,9000.0,720,1280,5,9.0,12",
        '1,71,AD,2022-04-01,Web,1,,720,1280,5,,"39,7"',
    ]
    text(data / "video_features_basic_1k.csv", VIDEOS, videos)
    return folder


def test_kuairand_has_several_tasks(tmp_path: Path, prepare_command: Command) -> None:
    folder = kuairand_1k(tmp_path / "KuaiRand-1K")
    log = kuairand.load(folder, KuaiRandOptions(), 0)
    assert (log.name, log.time_unit, len(log.events)) == ("KuaiRand-1K", "ms", 40)
    assert log.tasks[:2] == ("is_click", "is_like")
    assert log.events["label is_like"].sum() == 10
    assert log.events["signal play_time_s"][2] == 3.0
    assert log.items is not None
    assert log.items.select("item_id", "item author", "item video_type", "item tag").rows() == [
        *((0, 70, "NORMAL", 12), (1, 71, "AD", 39))
    ]
    asked = ("--from", folder, "--out", tmp_path / "out")
    code, _, error = prepare_command("kuairand", *asked)
    assert (code, error) == (0, "")
    dataset = open_dataset(tmp_path / "out")
    assert set(dataset.requests("test").labels) == set(kuairand.TASKS)
    assert {"is_click", "is_like", "long_view"} <= {*dataset.signals}
    # Tabs 0, 0, 1, 1: of 32 events of training, 0 has 12 and the others 10 each.
    assert dataset.context == {"tab": 4}
    assert dataset.requests("test").context["tab"].tolist() == [1, 1, 2, 2]
    assert "tab" not in dataset.info["read"]["unread"]


def test_kuairand_without_tabs(tmp_path: Path) -> None:
    folder = kuairand_1k(tmp_path / "KuaiRand-1K")
    for file in (folder / "data").glob("log_standard_*.csv"):
        file.write_text("\n".join(line.rpartition(",")[0] for line in file.read_text().split()))
    log = kuairand.load(folder, KuaiRandOptions(), 0)
    assert not [name for name in log.events.columns if name.startswith("context ")]


def test_kuairand_bad_rows_are_refused(tmp_path: Path) -> None:
    folder = kuairand_1k(tmp_path / "bad")
    file = folder / "data" / "log_standard_4_08_to_4_21_1k.csv"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:3], lines[3].replace(",1500,", ",1500,x", 1)]) + "\n")
    with pytest.raises(DataError, match=r"4_21_1k.csv: column time_ms, line 4: "):
        kuairand.load(folder, KuaiRandOptions(), 0)
    with pytest.raises(DataError, match=r"no log_standard_\*.csv in this folder"):
        kuairand.load(tmp_path, KuaiRandOptions(), 0)
