"""Storage of every kind by the same functions: a folder, fsspec's memory, and errors that people read."""

import fsspec
import pytest
from messages import refusal

from vitscale.ground import storage
from vitscale.ground.errors import RecipeError, StorageError


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield "memory://storage-test"
    if fs.exists("/storage-test"):
        fs.rm("/storage-test", recursive=True)


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    """A folder or URL where nothing is yet, and what writes a file there."""
    if request.param == "local":
        return str(tmp_path / "place")
    return request.getfixturevalue("memory") + "/place"


def write(where: str, content: bytes) -> None:
    with fsspec.open(where, "wb", auto_mkdir=True) as file:
        file.write(content)


def test_what_is_there_is_told_alike(place):
    assert not storage.exists(place) and not storage.is_folder(place) and storage.names_in(place) == []
    write(storage.join(place, "a/1.bin"), b"12345")
    write(storage.join(place, "b.bin"), b"")
    assert storage.exists(place) and storage.is_folder(place) and storage.size_of(place) is None
    assert storage.names_in(place) == ["a", "b.bin"]
    assert storage.sizes_in(place) == {"b.bin": 0} and storage.sizes_in(storage.join(place, "a")) == {"1.bin": 5}
    assert storage.sizes_in(storage.join(place, "none")) == {}
    file = storage.join(place, "a/1.bin")
    assert storage.size_of(file) == 5 and storage.exists(file) and not storage.is_folder(file)
    assert storage.size_of(storage.join(place, "b.bin")) == 0
    assert storage.read_bytes(file) == b"12345"
    with storage.open_stream(file) as stream:
        assert stream.read(2) == b"12"
    with pytest.raises(FileNotFoundError) as caught:
        storage.read_bytes(storage.join(place, "none"))
    assert str(caught.value.filename) == storage.join(place, "none") and caught.value.strerror


def test_changes_by_others_are_seen(memory):
    write(f"{memory}/x/1", b"1")
    assert storage.names_in(f"{memory}/x") == ["1"]
    write(f"{memory}/x/2", b"22")
    write(f"{memory}/x/1", b"111")
    assert storage.names_in(f"{memory}/x") == ["1", "2"] and storage.size_of(f"{memory}/x/1") == 3


def test_put_get_and_removal_of_one_folder_only(memory, tmp_path):
    (tmp_path / "here").write_bytes(b"content")
    for name in ("x/state/1", "x/state/deep/2", "x/state-of-others", "x/data"):
        storage.put(tmp_path / "here", f"{memory}/{name}")
    storage.remove_folder(f"{memory}/x/state/")
    storage.remove_folder(f"{memory}/x/state/")  # there is none any more
    assert storage.names_in(f"{memory}/x") == ["data", "state-of-others"]
    storage.get(f"{memory}/x/data", tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == b"content"


def test_kinds_that_are_not_there():
    with refusal(RecipeError, "sources", "nothing://x"):
        storage.filesystem("nothing://x")
    try:
        import gcsfs  # noqa: F401
    except ImportError:
        with pytest.raises(RecipeError, match=r"gs://.*pip install gcsfs"):
            storage.filesystem("gs://bucket/x")


class NoCredentialsError(Exception):
    """Named like that of botocore."""


def test_what_is_tried_again_and_what_is_not(monkeypatch):
    monkeypatch.setattr(storage, "_PAUSES", (0.0, 0.0, 0.0))
    answers: list[object] = [ConnectionResetError("reset"), TimeoutError(), b"content"]
    tries = 0

    def act() -> object:
        nonlocal tries
        answer = answers[tries]
        tries += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert storage.patiently("s3://b/x", act) == b"content" and tries == 3
    for error, raised, message in (
        (FileNotFoundError("b/x"), FileNotFoundError, "No such file or directory: 's3://b/x'"),
        (FileNotFoundError("The specified bucket does not exist"), FileNotFoundError, "bucket does not exist"),
        (PermissionError("Forbidden"), PermissionError, "Forbidden: 's3://b/x'"),
        (NoCredentialsError("Unable to locate credentials"), PermissionError, "no access: Unable to locate"),
    ):
        answers, tries = [error] * 5, 0
        with pytest.raises(raised, match=message):
            storage.patiently("s3://b/x", act)
        assert tries == 1
    answers, tries = [ConnectionResetError("reset")] * 5, 0
    with pytest.raises(StorageError, match=r"s3://b/x.*\b4\b.*ConnectionResetError: reset"):
        storage.patiently("s3://b/x", act)
    assert tries == 4
