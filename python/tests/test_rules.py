"""Tests of the temporary folders that a template manages for its confined workers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bulkhead._rules import ENTRIES_AT_ONCE, Temporary

DEPTH = 1200


@pytest.fixture
def temporary(tmp_path: Path) -> Temporary:
    return Temporary(os.fsencode(tmp_path), 0)


def rounds(temporary: Temporary, name: bytes, rounds_max: int) -> int:
    """Returns the number of calls to ``remove`` until nothing is left to do."""
    for number in range(1, rounds_max + 1):
        if temporary.remove(name):
            return number
    raise AssertionError(f"not removed in {rounds_max} rounds")


def test_removes_a_folder_with_its_contents(temporary: Temporary, tmp_path: Path) -> None:
    os.close(temporary.make(b"empty"))
    os.close(temporary.make(b"full"))
    for folder in ("one", "one/two", "other"):
        (tmp_path / "full" / folder).mkdir()
        (tmp_path / "full" / folder / "file").touch()
    (tmp_path / "full" / "link").symlink_to("/")
    (tmp_path / "full" / "other").chmod(0)
    assert rounds(temporary, b"empty", 1) == 1
    assert rounds(temporary, b"full", 1) == 1
    assert rounds(temporary, b"was never there", 1) == 1
    assert os.listdir(tmp_path) == []
    assert os.path.isdir("/")


def test_many_entries_are_removed_in_steps(temporary: Temporary, tmp_path: Path) -> None:
    os.close(temporary.make(b"many"))
    for number in range(ENTRIES_AT_ONCE + 1):
        (tmp_path / "many" / str(number)).touch()
    assert rounds(temporary, b"many", 2) == 2
    assert os.listdir(tmp_path) == []


def test_removes_a_deep_tree_with_conflicting_names(temporary: Temporary, tmp_path: Path) -> None:
    place = temporary.make(b"deep")
    for _ in range(DEPTH):
        os.mkdir(b".bulkhead-1", dir_fd=place)
        below = os.open(b".bulkhead-1", os.O_PATH | os.O_DIRECTORY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)
    rounds(temporary, b"deep", 4 * DEPTH)
    assert os.listdir(tmp_path) == []


def test_conflicting_names_do_not_prevent_removal(temporary: Temporary, tmp_path: Path) -> None:
    """A worker can create folders whose names resemble those of moved folders."""
    os.close(temporary.make(b"taken"))
    for number in range(ENTRIES_AT_ONCE + 1):
        (tmp_path / "taken" / f".bulkhead-{number}" / "in" / "it").mkdir(parents=True)
    rounds(temporary, b"taken", 20)
    assert os.listdir(tmp_path) == []
