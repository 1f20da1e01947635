"""The `jagged` command: what it lists, what it imports, and how it ends."""

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from jagged_ranking import cli, paths


def test_without_arguments_it_prints_help(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"    {name} " in out or f"    {name}\n" in out for name in cli.COMMANDS)


def test_the_version_is_that_of_the_distribution(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"jagged {version('jagged-flash-attention')}\n"


@pytest.mark.parametrize("command", [[], *([name] for name in cli.COMMANDS)])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: jagged" in capsys.readouterr().out


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from jagged_ranking import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'pandas', 'matplotlib', 'papermill'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("command", ["run", "reproduce", "figures", "train", "evaluate"])
def test_help_does_not_import_torch(command):
    code = (
        "import sys; from jagged_ranking import cli\n"
        f"try: cli.main(['{command}', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'pandas', 'papermill'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("error", [ValueError("two\nlines"), FileNotFoundError(2, "gone", "x")])
def test_an_error_of_the_user_is_one_line(monkeypatch, capsys, error):
    def fail(arguments: object) -> None:
        raise error

    monkeypatch.setattr(cli, "print_datasets", fail)
    assert cli.main(["datasets"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jagged: ")
    assert err.count("\n") == 1
    for verbose in (["--verbose", "datasets"], ["datasets", "--verbose"]):
        assert cli.main(verbose) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("Traceback (most recent call last):")
        assert "in fail\n" in err
        assert err.splitlines()[-1].startswith("jagged: ")
    assert cli.main(["datasets"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_line_is_written_in_one_piece():
    """Unbuffered, as torchrun has it: between two writes another rank's line may come."""
    read, write = os.pipe2(os.O_DIRECT)  # keeps writes apart
    command = [sys.executable, "-u", "-m", "jagged_ranking", "evaluate"]
    options = ["--data", "nowhere", "--run", "nowhere"]
    status = subprocess.run([*command, *options], stderr=write, check=False).returncode
    os.close(write)
    with open(read, "rb", buffering=0) as said:
        line = said.read(4096)
    assert status == 1
    assert line.startswith(b"jagged: ")
    assert line.endswith(b"\n")


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    def fail(arguments: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(cli, "print_datasets", fail)
    with pytest.raises(KeyError):
        cli.main(["datasets"])


def test_an_interrupt_is_130_and_quiet(monkeypatch, capsys):
    def interrupt(arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "print_datasets", interrupt)
    assert cli.main(["datasets"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("status", [None, 0, 1, 3])
def test_what_a_command_returns_is_the_status(monkeypatch, status):
    monkeypatch.setattr(cli, "print_datasets", lambda arguments: status)
    assert cli.main(["datasets"]) == (status or 0)


@pytest.fixture
def hang_up():
    """What a terminal that is closed does to a process, whatever it does to this one."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_as_an_interrupt_does(monkeypatch, number):
    ended = []

    def told(arguments: object) -> None:
        assert callable(signal.getsignal(number))  # else it would end the tests
        try:
            os.kill(os.getpid(), number)
        finally:
            ended.append(number)  # what has to be put away is

    monkeypatch.setattr(cli, "print_datasets", told)
    assert cli.main(["datasets"]) == 128 + number
    assert ended == [number]
    assert signal.getsignal(number) is signal.SIG_DFL  # for who called it


@pytest.mark.usefixtures("hang_up")
def test_a_signal_that_is_ignored_stays_so(monkeypatch):
    """As under nohup."""
    monkeypatch.setattr(cli, "print_datasets", lambda _: os.kill(os.getpid(), signal.SIGHUP))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert cli.main(["datasets"]) == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["reproduec"])
    assert ended.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error():
    process = subprocess.run(
        f"'{sys.executable}' -m jagged_ranking.cli datasets | true",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in process.stderr
    assert "Exception" not in process.stderr


def test_the_checkout_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.delenv("JAGGED_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    assert (paths.ROOT / "pyproject.toml").is_file()
    assert paths.RUNS == paths.ROOT / "figures" / "runs"


def test_somebody_elses_project_is_no_checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("JAGGED_HOME", raising=False)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").touch()
    installed = tmp_path / ".venv" / "lib" / "jagged_ranking" / "paths.py"
    monkeypatch.setattr(paths, "__file__", str(installed))
    with pytest.raises(paths.NoCheckoutError, match="no checkout"):
        _ = paths.ROOT
    (tmp_path / "src" / "jagged_ranking").mkdir(parents=True)
    assert tmp_path == paths.ROOT  # installed inside of the checkout


def test_a_checkout_can_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAGGED_HOME", str(tmp_path))
    with pytest.raises(paths.NoCheckoutError, match="JAGGED_HOME"):
        _ = paths.CACHE
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").touch()
    assert tmp_path.resolve() / "build" / "cache" == paths.CACHE
    monkeypatch.setenv("CLICK_DATA_DIR", str(tmp_path / "logs"))
    assert tmp_path.resolve() / "logs" == paths.DATA
    assert not hasattr(paths, "ELSEWHERE")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(28, "No space left on device"), "'a/folder'"),
        (OSError(28, "No space left on device", "a/file"), "'a/file'"),
        (OSError("a word of a library"), "a word of a library"),
    ],
)
def test_an_error_that_names_no_file_names_where_it_was(error, named):
    with pytest.raises(OSError, match=f"{named}$"), paths.naming(Path("a/folder")):
        raise error


def test_datasets_are_looked_for_where_runs_look(tmp_path, monkeypatch, capsys):
    home = tmp_path / "home"
    (home / "notebooks").mkdir(parents=True)
    (home / "pyproject.toml").touch()
    monkeypatch.setenv("JAGGED_HOME", str(home))
    monkeypatch.delenv("CLICK_DATA_DIR", raising=False)

    def listed():
        assert cli.main(["datasets"]) == 0
        return capsys.readouterr().out

    assert f"There is no folder {home / 'data'};" in listed()
    for folder in (tmp_path / "shared" / "data", home / "data", tmp_path / "named"):
        (folder / "ml-100k").mkdir(parents=True)
        if folder.name == "named":
            monkeypatch.setenv("CLICK_DATA_DIR", str(folder))
        assert folder == paths.DATA
        assert f"here: {folder / 'ml-100k'}" in listed()
    monkeypatch.delenv("CLICK_DATA_DIR")
    monkeypatch.setenv("JAGGED_HOME", str(tmp_path))
    assert "None looked for;" in listed()


@pytest.mark.parametrize("size", ["", "0", "-1", "two"])
def test_a_group_of_no_processes_is_refused(monkeypatch, capsys, size):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)
    assert cli.main(["datasets"]) == 1
    said = f"jagged: WORLD_SIZE must be a number of processes, got {size!r}\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(("rank", "said"), [("0", "start it without torchrun"), ("1", "")])
def test_what_one_process_does_is_refused_to_several(
    rank: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["datasets"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == bool(said)
    assert said in captured.err
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli.main(["datasets"]) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK")
    assert cli.main(["datasets"]) == 0  # a cluster's scheduler, and no group of torchrun's
