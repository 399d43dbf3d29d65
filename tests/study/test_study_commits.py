"""Results name the code that made them: every line's commit is in the history, or is known not to be."""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = {
    json.loads(line)["commit"]
    for path in (ROOT / "studies").glob("*.jsonl")
    for line in path.read_text(encoding="utf-8").splitlines()
}
# Commits of work that was laid anew before it landed, and runs of changes that were not committed: docs/study.md.
NOT_KEPT = {"25ff276", "6500341", "6822161", "f6dd9f5", "75e2cce-dirty", "86b399d-dirty"}


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def has_history() -> bool:
    """Whether this is a whole clone of the project: not an archive, and not CI's last commit alone."""
    try:
        tracked = git("ls-files", "--error-unmatch", "studies/cifar10.toml").returncode == 0
        shallow = git("rev-parse", "--is-shallow-repository").stdout.strip()
    except OSError:
        return False
    return tracked and shallow == "false"


def test_every_line_names_a_commit() -> None:
    """As `git describe --always` does; runs of changes that were not committed are told one by one."""
    assert NAMES
    unknown = {name for name in NAMES - NOT_KEPT if not re.fullmatch(r"(\S+-\d+-g)?[0-9a-f]{7,40}", name)}
    assert not unknown


def test_exceptions_occur_and_are_explained() -> None:
    page = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    assert NOT_KEPT <= NAMES
    assert all(name.removesuffix("-dirty") in page for name in NOT_KEPT)


@pytest.mark.skipif(not has_history(), reason="git has no history here")
@pytest.mark.parametrize("name", sorted(NAMES - NOT_KEPT))
def test_the_commit_is_in_the_history(name: str) -> None:
    """An ancestor: a commit that only this clone has would not be found in another."""
    asked = git("merge-base", "--is-ancestor", name, "HEAD")
    assert asked.returncode == 0, asked.stderr or f"{name} is on no way to HEAD"
