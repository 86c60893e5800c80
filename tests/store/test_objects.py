"""Conditional writes on an S3 store, and what is said of stores that cannot be used."""

import threading
from collections.abc import Iterable
from typing import Any

import fsspec
import pytest

from batchrun.errors import OutputRefused, StorageFailed
from batchrun.store.objects import Objects
from batchrun.store.store import Store
from tests.s3 import S3, Application, Environ, without_conditions


@pytest.fixture
def objects(s3: S3) -> Objects:
    return Objects.open("s3://lake/place")


def test_what_is_created_is_not_replaced(objects, tmp_path):
    (tmp_path / "file").write_bytes(b"second")

    objects.create("a/b", b"first")
    for content in (b"second", tmp_path / "file"):
        with pytest.raises(FileExistsError):
            objects.create("a/b", content)

    assert objects.get("a/b") == b"first"
    assert objects.get("a/none") is None
    assert {key: each.size for key, each in objects.find("a/").items()} == {"a/b": 5}


def test_names_that_lead_out_of_a_folder_are_passed_over(objects, s3):
    for key in ("place/../../up", "place/a//b", "place/./c", "place/fine"):
        s3.write("lake", key, b"x")

    assert objects.find().keys() == {"fine"}


def test_of_writers_of_one_object_one_succeeds(objects):
    """The rule that a result rests on."""
    outcomes: list[str] = []

    def write(content: bytes) -> None:
        try:
            objects.create("race", content)
            outcomes.append(content.decode())
        except FileExistsError:
            outcomes.append("late")

    writers = [threading.Thread(target=write, args=(f"writer {number}".encode(),)) for number in range(7)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    (winner,) = set(outcomes) - {"late"}
    assert outcomes.count("late") == 6
    assert objects.get("race") == winner.encode()


def test_an_answer_that_is_lost_on_the_way_does_not_make_a_loser(objects, s3):
    """The client sends the request again, and finds its own object in the way."""
    lost: list[str] = []

    def lose_first_answer(environ: Environ, application: Application, start: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT" and not lost:
            lost.append(environ["PATH_INFO"])
            list(application(environ, lambda *_: None))
            start("503 Slow Down", [])
            return [b""]
        return application(environ, start)

    s3.spoil = lose_first_answer
    objects.create("ours", b"content")

    assert lost == ["/lake/place/ours"]
    assert s3.requests.count("PUT /lake/place/ours") == 2
    assert objects.get("ours") == b"content"


def test_a_store_that_does_not_heed_conditions_is_refused_before_anything_is_written(s3):
    s3.spoil = without_conditions

    with (
        pytest.raises(OutputRefused, match="does not heed If-None-Match") as refusal,
        Store.open("s3://lake/out").lock(),
    ):
        pytest.fail("the lock was granted")

    assert refusal.value.exit_code == 73
    assert s3.keys("lake") == []


def test_a_bucket_that_is_not_there_is_named(s3):
    with pytest.raises(OutputRefused, match="cannot write s3://none/out: The specified bucket does not exist"):
        Store.open("s3://none/out")


@pytest.mark.parametrize("url", ["s3://lake", "s3://lake/", "gs://lake/out", "https://host/out"])
def test_a_url_that_no_result_can_be_written_to_is_refused(s3, url):
    with pytest.raises(OutputRefused, match=r"give -o s3://BUCKET/NAME|choose another -o"):
        Store.open(url)


def test_a_client_that_is_not_installed_is_named(s3, monkeypatch):
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)

    with pytest.raises(OutputRefused, match="s3fs is not installed; pip install s3fs") as refusal:
        Store.open("s3://lake/out")

    assert refusal.value.exit_code == 73


def test_missing_credentials_are_named(s3, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    fsspec.filesystem("s3").clear_instance_cache()

    with pytest.raises(OutputRefused, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"):
        Store.open("s3://lake/out")

    fsspec.filesystem("s3").clear_instance_cache()


def test_a_store_that_fails_on_the_way_is_a_failed_disk(objects, s3):
    def forbid(environ: Environ, application: Application, start: Any) -> Iterable[bytes]:
        start("403 Forbidden", [])
        return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]

    s3.spoil = forbid

    with pytest.raises(StorageFailed, match="s3://lake/place/a: Access Denied; check the permissions") as failure:
        objects.put("a", b"content")

    assert failure.value.exit_code == 74
