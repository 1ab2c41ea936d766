"""Shipped data files are found in a checkout and in an installed wheel."""

import pytest

from kvprobe import resources
from kvprobe.errors import DataError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package folder in a tree of its own."""
    folder = tmp_path / "place" / "kvprobe"
    folder.mkdir(parents=True)
    monkeypatch.setattr(resources, "PACKAGE", folder)
    return folder


def write(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("text")
    return path


def test_a_checkout_has_them_beside_the_package(package):
    wanted = write(package.parent / "data" / "tasks" / "decoys.txt")
    assert resources.path("tasks", "decoys.txt") == wanted
    assert resources.path("tasks") == wanted.parent
    assert resources.path() == package.parent / "data"


def test_a_wheel_has_them_inside_the_package(package):
    wanted = write(package / "data" / "tasks" / "decoys.txt")
    assert resources.path("tasks", "decoys.txt") == wanted
    write(package.parent / "data" / "tasks" / "decoys.txt")  # somebody else's folder named data, beside the package
    assert resources.path("tasks", "decoys.txt") == wanted


def test_a_stranger_beside_the_package_does_not_hide_them(package):
    write(package.parent / "data" / "other.txt")
    wanted = write(package / "data" / "essays" / "one.txt")
    assert resources.path("essays", "one.txt") == wanted


def test_a_missing_file_names_both_places(package):
    with pytest.raises(DataError) as caught:
        resources.path("tasks", "nothing.txt")
    message = str(caught.value)
    assert "'tasks/nothing.txt' is missing" in message
    assert str(package / "data" / "tasks" / "nothing.txt") in message
    assert str(package.parent / "data" / "tasks" / "nothing.txt") in message


def test_the_real_files_are_there():
    assert len(list(resources.path("essays").glob("*.txt"))) >= 12
    assert resources.path("tasks", "decoys.txt").is_file()
