"""MovieLens folders and zips that cannot be used: one line that says what and where."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from grouplens import ratings_csv, ratings_dat, u_data
from refusal import Command, refused


@pytest.mark.parametrize(
    ("write", "old", "new", "expected"),
    [
        (ratings_csv, "2,20,3.0,1000", "2,20,good,1000", "rating, line 4: 'good' is not a finite"),
        (ratings_csv, "2,20,3.0,1000", "2,20,3.0,", "timestamp, line 4: no time"),
        (ratings_csv, "2,20,3.0,1000", "2,20,3.0,-7", "timestamp, line 4: '-7' is a negative"),
        (ratings_csv, "movieId", "film", "movieId: missing; the file has: userId, film, rating"),
        (ratings_dat, "2::20::3::1000", "2::20::3", "timestamp, line 3: no time"),
        (ratings_dat, "2::20::3::1000", "::20::3::1000", "userId, line 3: no id"),
        (u_data, "2\t20\t3\t1000", "2\t20\tx\t1000", "rating, line 3: 'x' is not a finite"),
    ],
)
def test_movielens_ratings(
    write: Callable[[Path], Path],
    old: str,
    new: str,
    expected: str,
    tmp_path: Path,
    prepare_command: Command,
) -> None:
    path = write(tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    error = refused(prepare_command, tmp_path, "movielens", "--from", tmp_path)
    assert error.startswith(f"jagged: {path}: column {expected}")


def test_movielens_duplicates_and_movies(tmp_path: Path, prepare_command: Command) -> None:
    path = ratings_csv(tmp_path)
    text = path.read_text()
    path.write_text(text + "2,10,1.0,1010\n")
    error = refused(prepare_command, tmp_path, "movielens", "--from", tmp_path)
    assert f"{path}: line 12: the same user, item and time" in error
    path.write_text(text)
    movies = tmp_path / "movies.csv"
    movies.write_text(movies.read_text() + "sixty,Title,Drama\n")
    error = refused(prepare_command, tmp_path, "movielens", "--from", tmp_path)
    assert f"{movies}: line 7: not a movie with genres" in error


def test_zip_errors_name_the_file_inside(tmp_path: Path, prepare_command: Command) -> None:
    archive = tmp_path / "ml-x.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("ml-x/ratings.csv", "userId,movieId,rating,timestamp\n1,2,5,soon\n")
    error = refused(prepare_command, tmp_path, "movielens", "--from", archive)
    assert f"{archive}/ml-x/ratings.csv: column timestamp, line 2: 'soon'" in error
    archive.write_bytes(archive.read_bytes()[:60])
    error = refused(prepare_command, tmp_path, "movielens", "--from", archive)
    assert f"{archive}: not a readable zip file" in error
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("ml-x/README.txt", "nothing")
    error = refused(prepare_command, tmp_path, "movielens", "--from", archive)
    assert f"{archive}: no MovieLens ratings in this zip" in error


def test_zips_that_cannot_be_unpacked(tmp_path: Path, prepare_command: Command) -> None:
    archive = tmp_path / "ml-x.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("ml-x/ratings.csv", "userId,movieId,rating,timestamp\n1,2,5,3\n")
    plain = archive.read_bytes()
    # The flags stand 6 bytes behind the head of a file, 8 behind its entry in the directory.
    locked = bytearray(plain)
    for head, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[plain.index(head) + flags] |= 1
    archive.write_bytes(locked)
    error = refused(prepare_command, tmp_path, "movielens", "--from", archive)
    assert f"{archive}/ml-x/ratings.csv: is encrypted; unpack it" in error
    unknown = bytearray(plain)
    for head, method in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        unknown[plain.index(head) + method] = 9
    archive.write_bytes(unknown)
    error = refused(prepare_command, tmp_path, "movielens", "--from", archive)
    assert f"{archive}: cannot be unpacked (" in error
    large = bytearray(plain)
    entry = plain.index(b"PK\x01\x02")
    large[entry + 24 : entry + 28] = (3_000_000_000).to_bytes(4, "little")
    archive.write_bytes(large)
    error = refused(prepare_command, tmp_path, "movielens", "--from", archive)
    assert f"{archive}: unpacks to more than 2.1 GB, which is not read from a zip" in error


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"movieId,title,genres\n1,caf\xe9,Drama\n", "line 2: bytes that are not UTF-8"),
        ("movieId,title\n1,a\n".encode("utf-16"), "line 1: the header is not movieId,title,genres"),
        (b"movieId,title,genres\n1,a,Drama\n2,a\n", "line 3: not a movie with genres"),
        (b"1,a,Drama\n", "line 1: the header is not movieId,title,genres"),
        (b'movieId,title,genres\n1,"' + b"x" * 200_000, "not readable (line 2: field larger"),
    ],
)
def test_lists_of_movies(
    content: bytes, expected: str, tmp_path: Path, prepare_command: Command
) -> None:
    ratings_csv(tmp_path)
    (tmp_path / "movies.csv").write_bytes(content)
    error = refused(prepare_command, tmp_path, "movielens", "--from", tmp_path)
    assert error.startswith(f"jagged: {tmp_path / 'movies.csv'}: {expected}")


def test_movies_are_found_by_integers(tmp_path: Path, prepare_command: Command) -> None:
    path = ratings_csv(tmp_path)
    path.write_text(path.read_text().replace("2,20,3.0,1000", "2,tt20,3.0,1000"))
    error = refused(prepare_command, tmp_path, "movielens", "--from", tmp_path)
    assert f"{path}: column movieId, line 4: 'tt20' is not an integer id" in error
