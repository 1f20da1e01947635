"""The line that says how far a notebook is."""

import io

import nbformat
import pytest
from tqdm import tqdm

from jagged_ranking.reproduce import progress
from jagged_ranking.reproduce.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def at_cell(shown: bool = True) -> Progress:
    """At the code cell below a heading, the fourth of nine cells."""
    seen = Progress("01_speed", 9, shown=shown)
    seen.start(nbformat.v4.new_markdown_cell("## Measuring\n\nEach."), 2)
    seen.start(nbformat.v4.new_code_cell("x = 1"), 3)
    return seen


def test_a_cell_without_parts_is_one_of_the_cells(clock, capsys):
    seen = at_cell()
    assert seen.line() == "01_speed: Measuring, cell 4 of 9"
    seen.start(nbformat.v4.new_markdown_cell("Who is missing here:"), 4)
    assert seen.line() == "01_speed: Measuring, cell 5 of 9"
    title = Progress("01_speed", 9, shown=False)
    title.start(nbformat.v4.new_markdown_cell("# 01 Speed: latency"), 0)
    assert title.line() == "01_speed: cell 1 of 9"


def test_batches_are_counted_and_what_was_kept_sets_no_pace(clock, capsys):
    seen = at_cell()
    capsys.readouterr()
    seen.write("the device's ceilings, torch.float32: ceiling_table: kept from now (a.parquet)\n")
    seen.write("1 of 5, A: ")
    seen.write("measure_attention: kept from now (b.parquet)\n2 of 5, B: ")
    clock[0] += 30
    seen.write("measure_attention: took 30 s\n3 of 5, C: ")
    assert seen.line() == "01_speed: Measuring, C, 2 of 5 done"
    said = "01_speed: Measuring, C, 2 of 5 done, 00:30 passed, about 01:30 left\n"
    assert capsys.readouterr().err == said


def test_a_bar_of_the_kernel_is_read_and_one_inside_of_it_named(clock, capsys):
    seen, outer = at_cell(), io.StringIO()
    with tqdm(total=4, desc="models", file=outer, mininterval=0) as bar:
        for _ in range(2):
            bar.update()
            clock[0] += 20
            seen.write(outer.getvalue())
            outer.truncate(0)
    assert seen.line() == "01_speed: Measuring, models, 2 of 4 done"
    seen.write("\n\rmean_pool seed 1:  40%|####      | 40/100 [00:01<00:02, 26.1step/s]\x1b[A")
    assert seen.line() == "01_speed: Measuring, mean_pool seed 1, 2 of 4 done"
    assert capsys.readouterr().err.splitlines()[-1].endswith("left")


def test_what_is_left_is_of_the_parts_that_are_left(clock, capsys):
    seen = at_cell()
    seen.write("models:   0%|          | 0/8 [00:00<?, ?it/s]\r")
    clock[0] += 40
    seen.write("models:  50%|#####     | 4/8 [00:40<00:40, 10s/it]\r")  # several at once
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("4 of 8 done, 00:40 passed, about 00:40 left")
    )


def test_warnings_are_not_shown(clock, capsys):
    seen = at_cell()
    before = seen.line()
    seen.write("x.py:3: UserWarning: 4 of 5, told\n  warn(3/4)\n")
    assert seen.line() == before


def test_a_log_file_gets_a_line_now_and_then(clock, capsys):
    seen = at_cell()
    for second in range(60):
        clock[0] += 1
        seen.write(f"{second + 1} of 60, A: took\n")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 + 60 // progress.PLAIN_SECONDS
    assert "\r" not in "".join(lines)


def test_a_terminal_gets_one_line_that_is_replaced(clock, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    seen = at_cell()
    seen.write("3 of 4, C: ")
    seen.close()
    err = capsys.readouterr().err
    assert "\r01_speed: Measuring, C, 2 of 4 done |" in err
    assert "\n" not in err


def test_quiet_is_quiet(clock, capsys):
    seen = at_cell(shown=False)
    seen.write("3 of 4, C: ")
    seen.close()
    assert capsys.readouterr() == ("", "")
