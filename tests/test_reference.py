"""The API reference: `make docs` of the public names of jagged_kernels, and of nothing else."""

import re
import subprocess
import sys

import jagged_kernels


def test_the_reference_has_the_public_names_by_topic(tmp_path):
    command = [sys.executable, "-W", "error::UserWarning", "-m", "pdoc", "--docformat", "google"]
    command += ["--output-directory", str(tmp_path), "jagged_kernels"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert [page.name for page in tmp_path.rglob("*.html") if page.stem != "index"] == [
        "jagged_kernels.html"
    ]
    page = (tmp_path / "jagged_kernels.html").read_text(encoding="utf-8")
    sections = re.findall(r'<section id="([^"]+)"', page)
    assert sections == jagged_kernels.__all__
    assert "<h6" in page, "docstrings are not read as Google's style: there are no Arguments"


def test_topics_have_each_public_name_once_in_the_order_of_the_reference():
    assert jagged_kernels.__doc__ is not None
    topics = re.findall(r"^- .*?(?=^- |\n\n|\Z)", jagged_kernels.__doc__, re.MULTILINE | re.DOTALL)
    named = [name for topic in topics for name in re.findall(r"`(\w+)`", topic)]
    assert named == jagged_kernels.__all__
