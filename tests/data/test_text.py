"""Text in other encodings, with blank lines, and packed: what is read, and what is refused."""

import codecs
import csv
import gzip
from pathlib import Path
from typing import Any

import pytest
from refusal import Command, refused

from click_data import DataError, history_lengths, open_dataset, plain, prepare
from click_data.text import read_text

HEADER = "user_id,item_id,timestamp,label"
ROWS = [f"{'Žofka' if t % 2 else 'Zoë'},i{t % 3},{t},{t // 2 % 2}" for t in range(12)]
TEXT = "\n".join([HEADER, *ROWS]) + "\n"


def prepared(path: Path, **options: Any) -> tuple[str, list[str], dict]:
    """The digest of what comes out, the users in it, and what was said of the input."""
    out = prepare("log", from_path=path, out=path.with_name(f"out-{path.name}"), **options)
    dataset = open_dataset(out)
    users = dataset._open("histories.parquet")["user_id"].to_pylist()  # pyright: ignore[reportPrivateUsage]
    return dataset.digest, users, dataset.info


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
    ],
)
def test_a_byte_order_mark_says_the_encoding(
    name: str, mark: bytes, encoding: str, tmp_path: Path
) -> None:
    usual = prepared(written(tmp_path / "usual.csv", TEXT.encode()))
    assert usual[1] == ["Zoë", "Žofka"]
    digest, _, info = prepared(written(tmp_path / name, mark + TEXT.encode(encoding)))
    assert digest == usual[0]
    assert info["read"].get("encoding") == (None if encoding == "utf-8" else encoding[:6])


@pytest.mark.parametrize("encoding", ["cp1250", "utf-16-le", "utf-8", "UTF8", "mac_latin2"])
def test_an_encoding_of_your_own(encoding: str, tmp_path: Path, prepare_command: Command) -> None:
    usual = prepared(written(tmp_path / "usual.csv", TEXT.encode()))
    text = TEXT.replace("Zoë", "Zoé") if encoding == "mac_latin2" else TEXT
    path = written(tmp_path / "log.csv", text.encode(encoding))
    digest, users, _ = prepared(path, encoding=encoding)
    assert (digest == usual[0]) == (text == TEXT)
    assert users == sorted({line.split(",")[0] for line in text.splitlines()[1:]})
    if encoding.lower() not in ("utf-8", "utf8"):
        error = refused(prepare_command, tmp_path, "log", "--from", path)
        assert "--encoding " in error
        code, out, _ = prepare_command(
            *("log", "--from", path, "--encoding", encoding, "--out", tmp_path / "again")
        )
        assert code == 0
        assert f"encoded in {encoding}" in out


def test_large_text_is_recoded_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_PIECE", 5)  # less than a line, and not a whole number of them
    for name in ("log.csv", "log.csv.gz"):
        _, users, _ = prepared(written(tmp_path / name, TEXT.encode("utf-16")))
        assert users == ["Zoë", "Žofka"]


@pytest.mark.parametrize(
    ("encoding", "line"),
    [
        (None, "1,caf\xe9,99,1".encode("latin-1")),
        ("ascii", "1,café,99,1".encode()),  # by chance it is UTF-8
        ("shift_jis", b"1,\x83,99,1"),
        ("utf-16-le", b"\x00\xd8" + "1,a,99,1".encode("utf-16-le")),  # half a pair
    ],
)
def test_bytes_that_are_not_of_the_encoding(
    encoding: str | None, line: bytes, tmp_path: Path, prepare_command: Command
) -> None:
    text = "\n".join([HEADER, "a,b,1,0", "a,c,2,1", "\n"]).encode(encoding or "ascii")
    more = "\na,d,100,0\na,b,101,1\na,b,102,0\na,b,103,0".encode(encoding or "ascii")
    path = written(tmp_path / "log.csv", text + line + more)
    options = ["--encoding", encoding] if encoding else []
    error = refused(prepare_command, tmp_path, "log", "--from", path, *options)
    told = f"line 5: bytes that are not {encoding or 'UTF-8'}; --encoding of jagged prepare log "
    assert error.startswith(f"jagged: {path}: {told}reads others, as in --encoding cp1252")
    _, _, info = prepared(path, encoding=encoding, drop_bad_rows=True)
    assert info["dropped"]["bad_rows"] == 1
    assert info["counts"]["events"] == 6


def test_a_header_that_is_not_utf8(tmp_path: Path, prepare_command: Command) -> None:
    path = written(tmp_path / "log.csv", b"user_id,item_id,timestamp,caf\xe9\n1,2,3,4\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert f"{path}: line 1: bytes that are not UTF-8; --encoding" in error


@pytest.mark.parametrize("name", ["no-such", "rot13", "base64", "undefined", "", "a\0b"])
def test_an_encoding_that_there_is_not(name: str, tmp_path: Path, prepare_command: Command) -> None:
    path = written(tmp_path / "log.csv", TEXT.encode())
    error = refused(prepare_command, tmp_path, "log", "--from", path, "--encoding", name)
    assert f"--encoding {name}: not an encoding of text" in error


def test_parquet_has_no_encoding(tmp_path: Path, prepare_command: Command) -> None:
    path = written(tmp_path / "log.parquet", b"")
    error = refused(prepare_command, tmp_path, "log", "--from", path, "--encoding", "utf-8")
    assert f"{path}: is Parquet, which needs no --encoding" in error


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("blank", ["", "  ", ",,,"])
@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_blank_lines_are_no_rows(
    end: str, blank: str, name: str, tmp_path: Path, prepare_command: Command
) -> None:
    usual = prepared(written(tmp_path / "usual.csv", TEXT.encode()))
    before = [] if blank == ",,," else [blank, blank]
    lines = [*before, HEADER, blank, *ROWS[:5], blank, blank, *ROWS[5:], blank, blank]
    path = written(tmp_path / name, (end.join(lines) + end).encode())
    digest, _, info = prepared(path, drop_bad_rows=True)
    assert digest == usual[0]
    assert info["dropped"] == {"rows": len(ROWS), "bad_rows": 0, "first_bad_rows": []}
    wrong = [*lines, "1,2,soon,1"]
    written(path, (end.join(wrong) + end).encode())
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert f"column timestamp, line {len(wrong)}: 'soon' is neither" in error
    wrong[-1] += ",5"
    written(path, (end.join(wrong) + end).encode())
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert f"line {len(wrong)}: 5 fields where 4 belong" in error


def test_a_file_of_blank_lines(tmp_path: Path, prepare_command: Command) -> None:
    path = written(tmp_path / "log.csv", b"\n \r\n\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert error.startswith(f"jagged: {path}: the file is empty")


def test_no_more_is_unpacked_than_a_limit(
    tmp_path: Path, prepare_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "LARGEST", 10_000_000)
    bomb = gzip.compress(TEXT.encode() + bytes([32]) * 20_000_000)
    for name in ("log.csv.gz", "log.tsv.gz"):
        path = tmp_path / name
        path.write_bytes(bomb)
        error = refused(prepare_command, tmp_path, "log", "--from", path)
        assert error == (
            f"jagged: {path}: unpacks to more than 0.0 GB, which is not read from a gz: unpack it "
            "and give the file"
        )
    monkeypatch.setattr(plain, "LARGEST", 30_000_000)
    assert prepare_command("log", "--from", path, "--out", tmp_path / "out")[0] == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "not one", "tail"])
def test_damaged_gzip(damage: str, tmp_path: Path, prepare_command: Command) -> None:
    packed = gzip.compress(("\n".join([HEADER, *ROWS * 999]) + "\n").encode())
    middle = len(packed) // 2
    content = {
        "cut": packed[:-20],
        "flipped": packed[:middle] + bytes(9) + packed[middle + 9 :],
        "not one": TEXT.encode(),
        "tail": packed + b"and more",
    }
    path = tmp_path / "log.csv.gz"
    path.write_bytes(content[damage])
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert error.startswith(f"jagged: {path}: cannot be read (")


@pytest.mark.parametrize("name", ["clicks [1].csv", "clicks*.csv", "a?.csv"])
def test_a_name_is_no_pattern(name: str, tmp_path: Path) -> None:
    written(tmp_path / "clicks 1.csv", b"user_id,item_id,timestamp\n")
    _, users, _ = prepared(written(tmp_path / name, TEXT.encode()))
    assert users == ["Zoë", "Žofka"]


def test_an_unknown_encoding_from_python(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--encoding nonsense: not an encoding"):
        prepared(written(tmp_path / "log.csv", TEXT.encode()), encoding="nonsense")


@pytest.mark.parametrize("drop_bad_rows", [False, True])
@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_a_quote_inside_an_unquoted_field_is_read_as_it_stands(
    drop_bad_rows: bool, name: str, tmp_path: Path
) -> None:
    usual = prepared(written(tmp_path / "usual.csv", TEXT.encode()))
    titles = ["plain", '"a, ""b""\nc"', '15" wide', ""]
    rows = [f"{row},{titles[t % 4]}" for t, row in enumerate(ROWS)]
    path = written(tmp_path / name, "\n".join([f"{HEADER},title", *rows, ""]).encode())
    digest, _, info = prepared(path, drop_bad_rows=drop_bad_rows)
    assert digest == usual[0]
    assert info["counts"]["events"] == len(ROWS)
    assert history_lengths(path).tolist() == [6, 6]
    table = read_text(path, wanted=("title",))
    assert (
        table.frame["title"].fill_null("").to_list() == ["plain", 'a, "b"\nc', '15" wide', ""] * 3
    )


def test_bad_lines_behind_a_quote_inside_a_field(tmp_path: Path, prepare_command: Command) -> None:
    rows = [ROWS[0], f'{ROWS[1][:-1]}1"', f"{ROWS[2]},5", *ROWS[3:]]
    path = written(tmp_path / "log.csv", "\n".join([HEADER, *rows, ""]).encode())
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert "line 4: 5 fields where 4 belong" in error
    assert "column label, line 3: '1\"' is not a finite number" in error
    _, _, info = prepared(path, drop_bad_rows=True)
    assert info["dropped"]["bad_rows"] == 2


@pytest.mark.parametrize(
    "lines",
    [  # polars reads these without a word, and takes several fields for one
        ['"aa",xx"x,z', 'z,x""",y', '"a""",xx"",z', "x,x,x", 'x,"""""a""",z'],
        [
            'x,",,",z z',
            '"""",xxx",xx"x',
            '"a""""",z z,",""a"',
            '""",a""",z z,"aa"',
            'yy,",,",z z',
            'z z,z z,","',
        ],
    ],
)
def test_quotes_do_not_merge_fields(lines: list[str], tmp_path: Path) -> None:
    path = written(tmp_path / "log.csv", "\n".join(["a,b,c", *lines, ""]).encode())
    table = read_text(path, wanted=("a", "b", "c"))
    assert [list(row) for row in table.frame.rows()] == list(csv.reader(lines))
