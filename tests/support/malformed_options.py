"""Options of `jagged prepare` out of their range, and places that cannot be written."""

from pathlib import Path

from malformed_inputs import ROWS, USAGE, Case, Write, file, prepare, text

_LOG = file("log.csv", text())
_LIKES = file("log.csv", text([row[:3] for row in ROWS], ("user_id", "item_id", "timestamp")))


def _nothing(folder: Path) -> None:
    """No input is needed."""


def cases() -> list[Case]:
    """All of this file."""
    return [*_common(), *_of_a_log(), *_synthetic(), *_usage(), *_places()]


def _synthetic_case(name: str, expected: str, *options: str) -> Case:
    return Case(name, prepare("synthetic", None, *options), expected, _nothing)


def _log_case(name: str, expected: str, *options: str, write: Write = _LOG) -> Case:
    return Case(name, prepare("log", "log.csv", *options), expected, write)


def _common() -> list[Case]:
    parts = "split: three fractions between 0 and 1 are needed"
    return [
        _log_case("shares that are no whole", "split: 0.8 + 0.1 + 0.2 is not 1",
                  "--split", "0.8", "0.1", "0.2"),
        _log_case("a share of nothing", parts, "--split", "0.9", "0.1", "0"),
        _log_case("a share below nothing", parts, "--split", "1.2", "-0.1", "-0.1"),
        _log_case("a share that is no number", parts, "--split", "nan", "0.1", "0.1"),
        _log_case("a share too small for an event", "the validation period is empty: 24 events at "
                  "24 distinct times cannot be split", "--split", "0.9", "0.01", "0.09"),
        _log_case("a history shorter than none", "min_history must not be negative, not -1",
                  "--min-history", "-1"),
        _log_case("a history longer than all", "no requests in the train period",
                  "--min-history", "1000"),
        _log_case("a seed below 0", "seed must not be negative, not -1", "--seed", "-1"),
        Case("a source that there is not", prepare("clicks", None), "no source 'clicks'; there "
             "are: synthetic, log, movielens, impressions", _nothing),
        Case("a log from nowhere", prepare("log", None), "source log needs --from PATH", _nothing),
        Case("MovieLens from nowhere", prepare("movielens", None), "source movielens needs --from",
             _nothing),
    ]  # fmt: skip


def _of_a_log() -> list[Case]:
    one = file("log.csv", text([("u", *row[1:3]) for row in ROWS], ("user_id", "item_id",
                                                                    "timestamp")))  # fmt: skip
    return [
        _log_case("a column of ours that there is not", "--column colour=...: not one of user_id, "
                  "item_id, timestamp, label, category", "--column", "colour=label"),
        _log_case("a column of theirs that there is not", "{in}/log.csv: column clicked: missing",
                  "--column", "label=clicked"),
        _log_case("a column for two of ours", "--column user_id=item_id: item_id is read as "
                  "item_id already; say which column that is", "--column", "user_id=item_id"),
        _log_case("a column named for two of ours", "--column label=x: x is read as timestamp "
                  "already", "--column", "label=x", "--column", "timestamp=x"),
        _log_case("a column named twice", "--column label=...: given twice",
                  "--column", "label=label", "--column", "label=item_id"),
        _log_case("a signal that there is not", "{in}/log.csv: column price: missing",
                  "--signal", "price"),
        _log_case("a signal of a taken name", "--signal label: the name is taken",
                  "--signal", "label"),
        _log_case("a signal named twice", "--signal item_id: given twice",
                  "--signal", "item_id", "--signal", "item_id"),
        _log_case("a separator of two characters", "--separator '::': not one character",
                  "--separator", "::"),
        _log_case("a separator of none", "--separator '': not one character", "--separator", ""),
        _log_case("a separator beyond ASCII", "--separator '·': not one character",
                  "--separator", "·"),
        _log_case("a quote as separator", "--separator '\"': not one character",
                  "--separator", '"'),
        _log_case("a line's end as separator", "--separator '\\n': not one character",
                  "--separator", "\n"),
        _log_case("negatives below none", "--negatives -1: must not be negative",
                  "--negatives", "-1"),
        _log_case("more negatives than items", "--negatives 5: the log has only 5 items, one of "
                  "them the positive", "--negatives", "5", write=_LIKES),
        _log_case("more negatives than a pool", "--negatives 4: more than one of 4 events can "
                  "give; see --pool", "--negatives", "4", "--pool", "4", write=_LIKES),
        _log_case("a pool of one", "--pool 1: must be 2 events at least", "--pool", "1",
                  write=_LIKES),
        _log_case("a user of everything", "no item could be drawn as label 0", write=one),
        _log_case("a threshold for a log", "source log has no option 'threshold'; it has: ",
                  "--threshold", "4"),
        Case("a column for MovieLens", prepare("movielens", "log.csv", "--column", "label=x"),
             "source movielens has no option 'columns'; it has: threshold", _LOG),
    ]  # fmt: skip


def _synthetic() -> list[Case]:
    return [
        _synthetic_case("an origin of what is made here", "source synthetic is made here; it takes "
                        "no --from", "--from", "{in}"),
        _synthetic_case("a separator of what is made here", "source synthetic has no option "
                        "'separator'", "--separator", "tab"),
        _synthetic_case("no users", "users", "--users", "0"),
        _synthetic_case("fewer events than users", "users", "--users", "10", "--events", "5"),
        _synthetic_case("more categories than items", "categories",
                        "--items", "5", "--categories", "6"),
        _synthetic_case("more events than memory", "at most 2147483647 events and items, not "
                        f"{10**15}", "--events", str(10**15)),
        _synthetic_case("more items than 64 bits", f"events and items, not {10**20}",
                        "--items", str(10**20)),
    ]  # fmt: skip


def _usage() -> list[Case]:
    def case(name: str, expected: str, *arguments: str) -> Case:
        return Case(name, ("prepare", *arguments), f"jagged prepare: error: {expected}", _LOG,
                    USAGE)  # fmt: skip

    source = ("log", "--from", "{in}/log.csv")
    whole = (*source, "--out", "{out}")
    return [
        case("no place to write", "the following arguments are required: --out", *source),
        case("no source", "the following arguments are required: SOURCE", "--out", "{out}"),
        case("an option without its value", "argument --from: expected one argument",
             "log", "--out", "{out}", "--from"),
        case("two shares", "argument --split: expected 3 arguments", *whole, "--split", "0.8",
             "0.2"),
        case("shares in words", "argument --split: invalid float value: 'most'",
             *whole, "--split", "most", "some", "some"),
        case("half a seed", "argument --seed: invalid int value: '0.5'", *whole, "--seed", "0.5"),
        case("a unit that there is not", "argument --time-unit: invalid choice: 'min'",
             *whole, "--time-unit", "min"),
        case("a column without theirs", "argument --column: 'user_id' is not NAME=YOURS",
             *whole, "--column", "user_id"),
    ]  # fmt: skip


def _places() -> list[Case]:
    def case(name: str, out: str, expected: str, write: Write, *options: str) -> Case:
        place = f"{{in}}/{out}".rstrip("/")
        arguments = ("prepare", "log", "--from", "{in}/log.csv", "--out", place, *options)
        return Case(name, arguments, f"{place}: {expected}", write)

    def with_log(write: Write) -> Write:
        def both(folder: Path) -> None:
            _LOG(folder)
            write(folder)

        return both

    def small(folder: Path) -> None:
        from click_data import prepare as make

        make("synthetic", out=folder / "out", users=9, items=9, categories=3, events=90)

    def small_and_more(folder: Path) -> None:
        small(folder)
        (folder / "out/notes.txt").write_text("mine")

    def locked(folder: Path) -> None:
        (folder / "locked").mkdir(mode=0o500)

    return [
        case("a file where to write", "out", "exists and is not a folder",
             with_log(file("out", b"x"))),
        case("a folder of others where to write", "out", "not empty and not a prepared data set",
             with_log(file("out/notes.txt", b"x"))),
        case("the folder of the input where to write", "", "not empty and not a prepared", _LOG),
        case("another data set where to write", "out", "holds another prepared data set; --force "
             "replaces it", with_log(small)),
        case("files of others beside a data set", "out", "holds other files than a prepared data "
             "set's, which --force would delete: notes.txt", with_log(small_and_more), "--force"),
        case("a file above where to write", "file/out", "cannot be written (",
             with_log(file("file", b"x"))),
        case("a link to itself where to write", "out", "cannot be written (",
             with_log(lambda folder: (folder / "out").symlink_to("out"))),
        Case("a name too long where to write", ("prepare", "log", "--from", "{in}/log.csv",
             "--out", "{in}/" + "x" * 300), f"File name too long: '{{in}}/{'x' * 300}'", _LOG),
        case("no permission to write", "locked/out", "cannot be written (", with_log(locked)),
    ]  # fmt: skip
