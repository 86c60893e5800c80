"""Where OUT can be: every refusal before any work, with its remedy, and nothing changed on the disk."""

import os
from pathlib import Path

import pytest

from batchrun.errors import OutputRefused
from batchrun.store.store import Store


def test_open_changes_nothing(bench):
    Store.open(bench.out)

    assert bench.tree() == {}


def test_output_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")

    with pytest.raises(OutputRefused, match="file is not a folder; choose another -o") as refusal:
        Store.open(tmp_path / "file" / "deep" / "out")

    assert refusal.value.exit_code == 73


def test_output_that_the_system_will_not_create_is_refused():
    """/proc takes no folders, not even from root, for whom every permission check passes."""
    store = Store.open(Path("/proc/batchrun-out"))

    with pytest.raises(OutputRefused, match="cannot create /proc/batchrun-out"), store.lock():
        pytest.fail("the lock was granted")


def test_unwritable_parent_is_refused_with_the_folder_named(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)

    with pytest.raises(OutputRefused, match=f"no permission to write in {tmp_path}"):
        Store.open(bench.out.parent / "new" / "out")

    assert bench.tree() == {}


@pytest.mark.parametrize("out", [".", "..", "/", "a/.."])
def test_output_without_a_name_is_refused(out):
    with pytest.raises(OutputRefused, match="no name of its own"):
        Store.open(Path(out))


@pytest.mark.parametrize("overwrite", [False, True])
def test_output_that_is_a_file_is_refused_also_with_overwrite(bench, overwrite):
    bench.out.write_text("mine")

    with pytest.raises(OutputRefused, match="not a folder; move it, or choose another -o"):
        Store.open(bench.out, overwrite=overwrite)

    assert bench.out.read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("names", [[], ["thesis.tex"], ["part-00000.parquet", "thesis.tex"]])
def test_folder_that_batchrun_did_not_write_is_refused_also_with_overwrite(bench, overwrite, names):
    bench.out.mkdir()
    for name in names:
        (bench.out / name).write_text("mine")
    before = bench.tree()

    with pytest.raises(OutputRefused, match="not a result of batchrun; move it"):
        Store.open(bench.out, overwrite=overwrite)

    assert bench.tree() == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("lost", "strange", "said"),
    [
        (True, [], "has lost files; move it away and run the same command again: every row's result is kept"),
        (False, ["notes.md"], "holds notes.md, which is not part of the result; move it elsewhere"),
        (False, ["a.md", "b.md"], "holds a.md and 1 more, which is not part of the result; move it elsewhere"),
    ],
)
def test_own_result_that_somebody_changed_is_told_from_a_foreign_folder(bench, inputs, overwrite, lost, strange, said):
    """A result that had lost a file was "not a result of batchrun", with its whole job folder beside it."""
    with bench.working() as store:
        bench.plan(store, 3)
        bench.commit(store, 0, [0, 1, 2])
        bench.publish(store, inputs(3))
    for name in strange:
        (bench.out / name).write_text("mine")
    if lost:
        (bench.out / "part-00000.parquet").unlink()
    before = bench.tree()

    with pytest.raises(OutputRefused, match=said):
        Store.open(bench.out, overwrite=overwrite)

    assert bench.tree() == before


@pytest.mark.parametrize("inside", ["out/more", "out/a/b", "out.batchrun/more"])
def test_a_place_inside_another_job_is_refused(bench, inputs, inside):
    """It would make a result that nobody can read of one that is complete."""
    with bench.working() as store:
        bench.commit(store, 0, [0, 1])
        bench.publish(store, inputs(2))
    with pytest.raises(OutputRefused, match=r"lies inside .*, which is another job's; choose another -o"):
        Store.open(bench.out.parent / inside, overwrite=True)
    Store.open(bench.out.with_name("out-more"))


def test_a_place_below_a_folder_that_is_called_like_a_suffix_is_as_good_as_any(tmp_path):
    Store.open(tmp_path / ".batchrun" / "night")


def test_result_without_its_job_folder_is_replaced_only_with_overwrite(bench):
    bench.out.mkdir()
    (bench.out / "part-00000.parquet").write_text("old")

    with pytest.raises(OutputRefused, match="--overwrite to replace it"):
        Store.open(bench.out)

    assert not Store.open(bench.out, overwrite=True).is_complete


def test_job_folder_that_is_a_file_is_refused(bench):
    bench.out.with_name("out.batchrun").write_text("mine")

    with pytest.raises(OutputRefused, match=r"out\.batchrun is in the way"):
        Store.open(bench.out)


def test_disk_without_hard_links_is_refused_before_any_work(bench, monkeypatch):
    def link(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)

    with pytest.raises(OutputRefused, match="no hard links"), Store.open(bench.out).lock():
        pytest.fail("the lock was granted")

    assert bench.tree() == {}


def test_job_that_fails_before_it_has_a_plan_leaves_nothing_behind(bench):
    store = Store.open(bench.out.parent / "not" / "yet" / "out")

    def fail() -> None:
        with store.lock():
            store.check({"output": "out"}, {"model": "echo"})
            raise ValueError("bad column")

    with pytest.raises(ValueError, match="bad column"):
        fail()

    assert bench.tree() == {}


def test_foreign_files_in_an_unused_job_folder_stay(bench):
    folder = bench.out.with_name("out.batchrun")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")

    with Store.open(bench.out).lock():
        pass

    assert bench.tree() == {"out.batchrun": None, "out.batchrun/notes.txt": b"mine"}
