"""Parameters are read from the cell and checked before anything runs."""

from pathlib import Path

import pytest

from jagged_ranking.cli import main
from jagged_ranking.reproduce.errors import RunError
from jagged_ranking.reproduce.parameters import (
    check_values,
    parse_assignments,
    parse_parameters,
    read_preset,
)
from jagged_ranking.reproduce.plan import make_plan

CELL = """\
out: str | None = None  # the folder
users = 8
rate = 0.5  # per second
label: str = "x"
lengths = [128, 256]
wastes: list[float] = [0.5]
names: list[str] | None = None
flag = False
options = {"a": 1}
"""


@pytest.fixture
def known():
    return parse_parameters(CELL)


def test_types_defaults_and_descriptions_are_read(known):
    assert {name: parameter.type for name, parameter in known.items()} == {
        "out": "str | None",
        "users": "int",
        "rate": "float",
        "label": "str",
        "lengths": "list[int]",
        "wastes": "list[float]",
        "names": "list[str] | None",
        "flag": "bool",
        "options": "dict",
    }
    assert known["lengths"].default == [128, 256]
    assert known["out"].description == "the folder"
    assert known["rate"].description == "per second"
    assert known["users"].description == ""


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("users=12", "users", 12),
        ("rate=1e-3", "rate", 0.001),
        ("rate=2", "rate", 2.0),
        ("label=12", "label", "12"),
        ("label=a=b", "label", "a=b"),
        ("lengths=64", "lengths", [64]),
        ("lengths=64,128", "lengths", [64, 128]),
        ("lengths=[64, 128]", "lengths", [64, 128]),
        ("lengths=[]", "lengths", []),
        ("wastes=0,0.9", "wastes", [0.0, 0.9]),
        ("names=a,b", "names", ["a", "b"]),
        ("names=None", "names", None),
        ("out=null", "out", None),
        ("flag=true", "flag", True),
        ("options={b: 2}", "options", {"b": 2}),
    ],
)
def test_values_are_taken_as_their_types(known, text, name, value):
    parsed = parse_assignments([text], known, "here")
    assert parsed == {name: value}
    assert type(parsed[name]) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        *("users=1.5", "users=true", "users=many", "users=1e400", "flag=1", "lengths=a,b"),
        *(
            "lengths=1.5",
            "rate=fast",
            "rate=true",
            "rate=nan",
            "rate=-.inf",
            "rate=1e999",
            "wastes=0.5,nan",
        ),
        *(f"rate={'9' * 400}", "names={a: 1}", "options=[1]"),
        *("options={a: 2024-01-01}", "options={1: a, b: c}"),
    ],
)
def test_a_value_of_another_type_is_refused(known, text):
    name, _, value = text.partition("=")
    with pytest.raises(RunError, match=f"`{name}` is {known[name].type.split('[')[0]}.*{value}"):
        parse_assignments([text], known, "here")


def test_an_unknown_name_is_answered_with_the_known_ones(known):
    with pytest.raises(RunError) as error:
        parse_assignments(["user=3"], known, "01_speed")
    assert "01_speed has no parameter `user`; did you mean `users`?" in str(error.value)
    assert all(name in str(error.value) for name in known)
    with pytest.raises(RunError, match="no parameter `zzz`"):
        check_values({"zzz": 1}, known, "a preset")


def test_what_a_mapping_holds_is_of_its_types():
    known = parse_parameters("at: dict[str, list[int]] = {}")
    assert parse_assignments(["at={a: [1, 2]}"], known, "here") == {"at": {"a": [1, 2]}}
    for text in ("at={a: [x]}", "at={1: [1]}", "at={a: 1}"):
        with pytest.raises(RunError, match="`at` is dict"):
            parse_assignments([text], known, "here")


def test_a_value_without_a_name_is_refused(known):
    with pytest.raises(RunError, match="name=value"):
        parse_assignments(["users"], known, "here")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = f(1)", "default of `x` is not a literal"),
        ("import os", "line 1 is not `name = value`"),
        ("a = 1\na.b = 2", "line 2"),
        ("n: int = 'a'", "default of `n` is not int"),
        ("n: tuple = 1", "`tuple` is not a type"),
    ],
)
def test_a_cell_of_another_form_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        parse_parameters(source)


def test_a_description_behind_other_alphabets_is_found():
    assert parse_parameters('name = "größe"  # ×')["name"].description == "×"


OWN = "own={toy: {options: {%s}}}"


@pytest.mark.parametrize("given", ["options={%s}", OWN])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ('epochs: "3"', "parameter `epochs` is int, not '3'"),
        ("epochs: 2.5", "parameter `epochs` is int, not 2.5"),
        ("learning_rate: fast", "parameter `learning_rate` is float, not 'fast'"),
        ("learning_rate: .nan", "parameter `learning_rate` is float, not nan"),
        ("hidden: 64", "parameter `hidden` is list[int], not 64"),
        ("epoch: 3", "has no parameter `epoch`; did you mean `epochs`?"),
    ],
)
def test_an_option_of_training_is_named(tmp_path, capfd, given, option, message):
    words = ["run", "04_quality", "-p", given % option, "--out", str(tmp_path / "out")]
    assert main(words) == 1
    err = capfd.readouterr().err
    where = "own of toy, options" if given == OWN else "options"
    assert err.startswith(f"jagged: 04_quality, {where}")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_options_of_training_are_numbers_as_one_writes_them():
    own = "own={toy: {seeds: [1], options: {weight_decay: 1e-2}}}"
    given = ["options={learning_rate: 1e-3, dropout: 0, epochs: 2}", own]
    parameters = make_plan("04_quality", assignments=given).parameters
    assert parameters["options"] == {"learning_rate": 0.001, "dropout": 0, "epochs": 2}
    assert parameters["own"] == {"toy": {"seeds": [1], "options": {"weight_decay": 0.01}}}
    with pytest.raises(RunError, match="10_training_throughput, from_disk: parameter `dim` is int"):
        make_plan("10", assignments=["from_disk={dim: wide}"])


def test_options_in_a_notebook_of_ones_own_are_anything(add_notebook):
    add_notebook("03_mine", ["# A toy", "options = {}", "x = 1"])
    plan = make_plan("03_mine", assignments=['options={epoch: "3"}'])
    assert plan.parameters["options"] == {"epoch": "3"}


def test_an_unknown_preset_names_the_known_ones(tmp_path: Path):
    (tmp_path / "smoke.yaml").write_text("01_speed: {users: 1}\n")
    assert read_preset("smoke", tmp_path) == {"01_speed": {"users": 1}}
    with pytest.raises(RunError, match="no preset `big`; there is smoke"):
        read_preset("big", tmp_path)
    (tmp_path / "smoke.yaml").write_text("01_speed: [1]\n")
    with pytest.raises(RunError, match="mapping"):
        read_preset("smoke", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["01_good", "-p", "cuont=3"], "did you mean `count`?"),
        (["01_good", "-p", "count=3.5"], "`count` is int"),
        (["03_none"], "`03_none` is not a notebook; there is 01_good, 02_bad"),
        (["0"], "more than one notebook"),
        (["elsewhere/x.ipynb"], "no such notebook"),
        (["01_good", "--preset", "large"], "no preset `large`; there is smoke"),
        (["01_good", "--data", "nowhere"], "does not exist (no dataset.json in it)"),
    ],
)
def test_a_wrong_request_is_one_line_and_runs_nothing(checkout, capfd, arguments, message):
    assert main(["run", *arguments]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("jagged: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (checkout / "figures").exists()


def test_a_wrong_preset_is_refused(checkout, capfd):
    (checkout / "notebooks" / "params" / "smoke.yaml").write_text("01_good: {cuont: 1}\n")
    assert main(["run", "01_good", "--preset", "smoke"]) == 1
    assert "preset smoke, 01_good has no parameter `cuont`" in capfd.readouterr().err


def test_parameters_are_listed(checkout, capfd):
    assert main(["run", "01", "--parameters"]) == 0
    out = capfd.readouterr().out
    assert "count: int = 3\n    how many\n" in out
    assert "out: str | None = None" in out


def test_parameters_are_listed_as_a_preset_has_them(checkout, capfd):
    (checkout / "notebooks" / "params" / "smoke.yaml").write_text("01_good: {count: 7}\n")
    assert main(["run", "01_good", "--preset", "smoke", "--parameters"]) == 0
    out = capfd.readouterr().out
    assert "count: int = 7\n    how many\n" in out
    assert "preset: str = 'smoke'" in out
    assert main(["run", "01_good", "--preset", "smoke", "-p", "count=8", "--parameters"]) == 0
    assert "count: int = 8\n" in capfd.readouterr().out
    assert not (checkout / "figures").exists()
