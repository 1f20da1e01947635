"""MovieLens in each layout of GroupLens, as folders and zips of which one thing is broken."""

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from grouplens import LAYOUTS, MOVIES, RATINGS
from malformed_inputs import Case, Write, prepare

CSV, DAT, DATA = LAYOUTS["csv"], LAYOUTS["dat"], LAYOUTS["u.data"]
_Changed = tuple[Callable[[Path], Path], str, Callable[[bytes], bytes]]
_NONE = "no MovieLens ratings in this"


def cases() -> list[Case]:
    """All of this file."""
    return [*_folders(), *_ratings(), *_movies(), *_zips(), *_damaged_zips(), *_parquet()]


def _case(name: str, expected: str, write: Write, *options: str, path: str = "ml") -> Case:
    return Case(name, prepare("movielens", path, *options), expected, write)


def _changed(layout: Callable[[Path], Path], name: str, change: Callable[[bytes], bytes]) -> Write:
    """Writes a layout, one file of which is changed."""

    def write(folder: Path) -> None:
        place = folder / "ml"
        place.mkdir()
        layout(place)
        (place / name).write_bytes(change((place / name).read_bytes()))

    return write


def _instead(old: str, new: str) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new.encode("latin-1"), 1)

    return change


def _folders() -> list[Case]:
    def two(folder: Path) -> None:
        for name in ("one", "other"):
            (folder / "ml" / name).mkdir(parents=True)
            CSV(folder / "ml" / name)

    def other_name(folder: Path) -> None:
        (folder / "ml").mkdir()
        CSV(folder / "ml").rename(folder / "ml" / "my ratings.csv")

    return [
        _case("no MovieLens", "{in}/ml: no such file or folder", lambda folder: None),
        _case("an empty folder", f"{{in}}/ml: {_NONE} folder; one of ratings.csv, ratings.dat, "
              "u.data", lambda folder: (folder / "ml").mkdir()),
        _case("two folders of MovieLens in one", f"{{in}}/ml: {_NONE} folder", two),
        _case("ratings that are a folder", f"{{in}}/ml: {_NONE} folder",
              lambda folder: (folder / "ml/ratings.csv").mkdir(parents=True)),
        _case("ratings that are a dangling link", f"{{in}}/ml: {_NONE} folder", _dangling),
        _case("ratings of another name", "{in}/ml/my ratings.csv: not a MovieLens ratings file",
              other_name, path="ml/my ratings.csv"),
        _case("the list of movies in the place of ratings", "{in}/ml/movies.csv: not a MovieLens "
              "ratings file", _changed(CSV, "movies.csv", bytes), path="ml/movies.csv"),
    ]  # fmt: skip


def _dangling(folder: Path) -> None:
    (folder / "ml").mkdir()
    (folder / "ml/ratings.csv").symlink_to("gone.csv")


def _ratings() -> list[Case]:
    def csv(name: str, old: str, new: str, expected: str, *options: str) -> Case:
        write = _changed(CSV, "ratings.csv", _instead(old, new))
        return _case(name, f"{{in}}/ml/ratings.csv: {expected}", write, *options)

    def dat(name: str, old: str, new: str, expected: str) -> Case:
        write = _changed(DAT, "ratings.dat", _instead(old, new))
        return _case(name, f"{{in}}/ml/ratings.dat: {expected}", write)

    def data(name: str, old: str, new: str, expected: str) -> Case:
        write = _changed(DATA, "u.data", _instead(old, new))
        return _case(name, f"{{in}}/ml/u.data: {expected}", write)

    def whole(name: str, content: bytes, expected: str, *, of: str = "ratings.csv") -> Case:
        layout = {"ratings.csv": CSV, "ratings.dat": DAT, "u.data": DATA}[of]
        return _case(name, f"{{in}}/ml/{of}: {expected}", _changed(layout, of, lambda _: content))

    row = "2,20,3.0,1000"
    return [
        csv("a rating in words", row, "2,20,good,1000", "column rating, line 4: 'good' is not a"),
        csv("no rating", row, "2,20,,1000", "column rating, line 4: no number"),
        csv("a rating that is no number", row, "2,20,nan,1000", "column rating, line 4: 'nan' is"),
        csv("a movie in words", row, "2,twenty,3.0,1000", "column movieId, line 4: 'twenty' is "
            "not an integer id"),
        csv("a movie with zeros before it", row, "2,020,3.0,1000", "column movieId, line 4: '020' "
            "is not an integer id"),
        csv("a rating's time in milliseconds", row, "2,20,3.0,1600000000000", "column timestamp, "
            "line 4: '1600000000000' is after the year 2100"),
        csv("a field too many in ratings", row, f"{row},9", "line 4: 5 fields where 4 belong"),
        csv("a rating twice", row, f"{row}\n{row}", "line 5: the same user, item and time"),
        csv("columns of another names", "userId,movieId", "user,movie", "column userId: missing, "
            "and so are: movieId; the file has: user, movie, rating, timestamp; another layout can "
            "be read with: jagged prepare log"),
        csv("Latin-1 in ratings", row, "2,20,é,1000", "line 4: bytes that are not UTF-8"),
        whole("ratings without rows", b"userId,movieId,rating,timestamp\n", "the file is empty"),
        whole("ratings of no bytes", b"", "the file is empty", of="u.data"),
        whole("ratings in JSON", b'{"userId": 1}\n', "holds JSON"),
        whole("ratings with semicolons", b"userId;movieId;rating;timestamp\n1;2;3;4\n",
              "column userId: missing"),
        dat("one colon for two", "2::20::3::1000", "2:20:3:1000", "column rating, line 3: no "
            "number: the value is missing; column timestamp, line 3: no time"),
        dat("a field too few with colons", "2::20::3::1000", "2::20::3", "column timestamp, line "
            "3: no time"),
        dat("a field too many with colons", "2::20::3::1000", "2::20::3::1000::x", "line 3: 9 "
            "fields where 7 belong"),
        whole("commas in the place of colons", b"1,2,3,4\n", "line 1: 1 columns where 4 belong: "
              "userId, movieId, rating, timestamp",
              of="ratings.dat"),
        data("spaces in the place of tabs", "2\t20\t3\t1000", "2 20 3 1000", "column rating, line "
             "3: no number: the value is missing; column movieId, line 3: no id"),
        data("a header that u.data has not", "7\t30\t5\t1000", "user\titem\trating\ttime\n"
             "7\t30\t5\t1000", "column rating, line 1: 'rating' is not a finite number; column "
             "movieId, line 1: 'item' is not an integer id"),
        whole("three columns in u.data", b"1\t2\t3\n", "line 1: 3 columns where 4 belong",
              of="u.data"),
        csv("all ratings above the threshold", row, row, "column rating: every rating is at least "
            "0.5, so there is nothing to tell apart", "--threshold", "0.5"),
        csv("all ratings below the threshold", row, row, "column rating: every rating is below "
            "5.5", "--threshold", "5.5"),
        Case("a threshold that is no number", prepare("movielens", "ml", "--threshold", "nan"),
             "--threshold nan: not a number of stars", _changed(CSV, "ratings.csv", bytes)),
    ]  # fmt: skip


def _movies() -> list[Case]:
    def case(
        name: str, layout: Callable[[Path], Path], file: str,
        change: Callable[[bytes], bytes], expected: str,
    ) -> Case:  # fmt: skip
        return _case(name, f"{{in}}/ml/{file}: {expected}", _changed(layout, file, change))

    def item(change: Callable[[bytes], bytes]) -> _Changed:
        return DATA, "u.item", change

    def movies(change: Callable[[bytes], bytes]) -> _Changed:
        return CSV, "movies.csv", change

    no_movie = "not a movie with genres"
    return [
        case("movies without a header", *movies(_instead("movieId,title,genres\n", "")),
             "line 1: the header is not movieId,title,genres"),
        case("movies of no bytes", *movies(lambda _: b""), "line 1: the header is not"),
        case("a movie without genres", *movies(lambda _: b"movieId,title,genres\n1,a\n"),
             f"line 2: {no_movie}"),
        case("a movie that has no number", *movies(_instead("10,", "ten,")), f"line 2: {no_movie}"),
        case("Latin-1 among movies", *movies(lambda _: b"movieId,title,genres\n1,\xe9,Drama\n"),
             "line 2: bytes that are not UTF-8"),
        case("a title too long", *movies(lambda old: old + b'1,"' + b"x" * 200_000 + b'",Drama\n'),
             "not readable (line 7: field larger"),
        case("movies in JSON", *movies(lambda _: b'[{"movieId": 1}]'), "holds JSON"),
        case("movies in another pack", *movies(lambda _: b"PK\x03\x04"), "is no text"),
        case("a movie with commas for colons", DAT, "movies.dat", lambda _: b"10,Title,Drama\n",
             f"line 1: {no_movie}"),
        case("a movie with no flag set", *item(lambda _: b"10|T|01-Jan-1990||u" + b"|0" * 19),
             f"line 1: {no_movie}"),
        case("a movie with flags too few", *item(lambda _: b"10|Title|1\n"), f"line 1: {no_movie}"),
    ]  # fmt: skip


def _files(layout: Callable[[Path], Path] = CSV) -> dict[str, bytes]:
    """The content of a layout's files."""
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        layout(Path(place))
        return {path.name: path.read_bytes() for path in Path(place).iterdir()}


def _packed(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return buffer.getvalue()


def _zip(name: str, content: bytes, expected: str) -> Case:
    write = lambda folder: (folder / "ml.zip").write_bytes(content)  # noqa: E731
    return _case(name, f"{{in}}/ml.zip{expected}", write, path="ml.zip")


def _zips() -> list[Case]:
    files = _files()
    good, movies = files["ratings.csv"], files["movies.csv"]
    late = good.replace(b"2,20,3.0,1000", b"2,20,3.0,soon")
    broken = "column timestamp, line 4: 'soon' is neither"
    bomb = _packed({"ml/ratings.csv": good + b" " * 6_000_000}, zipfile.ZIP_DEFLATED)
    return [
        _zip("a zip of nothing", _packed({}), f": {_NONE} zip"),
        _zip("a zip of something else", _packed({"README": b"x"}), f": {_NONE} zip"),
        _zip("a zip within a zip", _packed({"ml.zip": _packed({"ml/ratings.csv": good})}),
             f": {_NONE} zip"),
        _zip("ratings in the folder of a Mac alone", _packed({"__MACOSX/ml/ratings.csv": good}),
             f": {_NONE} zip"),
        _zip("two ratings files of one name", _packed({"a/ratings.csv": good,
             "b/ratings.csv": good}), ": holds several files ratings.csv: a/ratings.csv, "
             "b/ratings.csv; unpack it and give the folder of one"),
        _zip("a folder called ratings.csv in a zip", _packed({"ml/ratings.csv/": b""}),
             f": {_NONE} zip"),
        _zip("names that lead out of a zip", _packed({"../../ratings.csv": late,
             "../../movies.csv": movies}), f"/../../ratings.csv: {broken}"),
        _zip("names from the root in a zip", _packed({"/etc/ratings.csv": late}),
             f"//etc/ratings.csv: {broken}"),
        _zip("a bad row in a zip", _packed({"ml/ratings.csv": late}), f"/ml/ratings.csv: {broken}"),
        _zip("bad movies in a zip", _packed({"ml/ratings.csv": good, "ml/movies.csv": b"x\n"}),
             "/ml/movies.csv: line 1: the header is not"),
        _zip("a zip that fills the disk", bomb, ": unpacks to more than"),
    ]  # fmt: skip


def _damaged_zips() -> list[Case]:
    good = _files()["ratings.csv"]
    plain = _packed({"ml/ratings.csv": good})
    deflated = _packed({"ml/ratings.csv": good * 20}, zipfile.ZIP_DEFLATED)

    # In the head of a file and in its entry in the directory a field stands at these places.
    def patched(content: bytes, places: Mapping[bytes, int], value: bytes) -> bytes:
        data = bytearray(content)
        for head, place in places.items():
            start = data.index(head) + place
            data[start : start + len(value)] = value
        return bytes(data)

    head, entry = b"PK\x03\x04", b"PK\x01\x02"
    locked = patched(plain, {head: 6, entry: 8}, b"\1")
    method = patched(plain, {head: 8, entry: 10}, b"\x09")
    large = patched(plain, {entry: 24}, (3_000_000_000).to_bytes(4, "little"))
    small = patched(deflated, {entry: 24}, (60).to_bytes(4, "little"))
    checksum = patched(plain, {head: 14, entry: 16}, bytes(4))
    stream = patched(deflated, {head: 50}, bytes(40))
    head_gone = patched(plain, {head: 0}, b"XXXX")
    unreadable = ": not a readable zip file, truncated?"
    return [
        _zip("a zip of no bytes", b"", unreadable),
        _zip("a zip cut off", plain[:60], unreadable),
        _zip("CSV called zip", good, unreadable),
        _zip("an encrypted zip", locked, "/ml/ratings.csv: is encrypted; unpack it and give the "
             "folder"),
        _zip("a zip packed in a way not known", method, ": cannot be unpacked ("),
        _zip("a zip that says it is large", large, ": unpacks to more than"),
        _zip("a zip that says it is small", small, f"{unreadable} (Bad CRC-32"),
        _zip("a zip with another checksum", checksum, unreadable),
        _zip("a zip with other bytes in a file", stream, unreadable),
        _zip("a zip without the head of a file", head_gone, unreadable),
    ]  # fmt: skip


def _parquet() -> list[Case]:
    users, movies, stars, times = (pa.array(list(column)) for column in zip(*RATINGS, strict=True))
    columns = {"user_id": users, "item_id": movies, "timestamp": times, "rating": stars}
    numbers = pa.array([list(MOVIES).index(movie) for movie in movies.to_pylist()])
    named = {**columns, "category_id": numbers}

    def case(
        name: str, table: Mapping[str, pa.Array], expected: str, meta: str | None = None
    ) -> Case:
        def write(folder: Path) -> None:
            made = pa.table(dict(table))
            if meta is not None:
                made = made.replace_schema_metadata({"category_names": meta})
            pq.write_table(made, folder / "interactions.parquet")

        path = "interactions.parquet"
        return _case(name, f"{{in}}/{path}: {expected}", write, path=path)

    lacking = {name: column for name, column in columns.items() if name != "rating"}
    no_names = "its metadata `category_names` is not a JSON list of names"
    return [
        case("ratings in Parquet without ratings", lacking, "column rating: missing; the file "
             "has: user_id, item_id, timestamp; another layout"),
        case("ratings in Parquet in lists", {**columns, "rating": pa.array([[1]] * len(RATINGS))},
             "column rating: values must be numbers"),
        case("names of categories that are no JSON", named, no_names, "[Drama"),
        case("names of categories that are no list", named, no_names, '{"0": "Drama"}'),
        case("categories in Parquet with halves", {**columns,
             "category_id": pa.array([0.5] * len(RATINGS))}, "column category_id, row 0: 0.5 is "
             "not an integer id"),
    ]  # fmt: skip
