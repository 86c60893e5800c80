"""Input files: which, in what order, with which columns, and what their rows are."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import DataError, InputMissing, UsageError
from batchrun.plan import readers, source
from batchrun.plan.source import expand, fingerprint, require_column, scan, schema


def write(path: Path, **columns: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return str(path)


def rows(inputs: list[str], columns: list[str] | None = None, **how: int) -> list[dict[str, object]]:
    files = expand(inputs)
    return [row for batch in scan(files, columns, **how) for row in batch.to_pylist()]


def test_rows_are_numbered_over_all_files_in_sorted_order(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", t=["c"])
    write(tmp_path / "a.parquet", t=["a", "b"])
    expected = [{"row_idx": 0, "t": "a"}, {"row_idx": 1, "t": "b"}, {"row_idx": 2, "t": "c"}]
    assert rows([str(tmp_path)]) == expected
    assert rows([str(tmp_path / "*.parquet")]) == expected
    assert rows([str(tmp_path / "b.parquet"), str(tmp_path / "a.parquet")], ["t"])[0] == {"row_idx": 0, "t": "c"}


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_limit_takes_the_first_rows(tmp_path: Path, limit: int) -> None:
    write(tmp_path / "a.parquet", t=["a", "b"])
    write(tmp_path / "b.parquet", t=["c"])
    got = rows([str(tmp_path)], limit=limit, batch_rows=1)
    assert [row["t"] for row in got] == ["a", "b", "c"][:limit]


def test_batches_are_no_longer_than_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", t=list(range(111)))
    lengths = [len(batch) for batch in scan(expand([path]), ["t"], batch_rows=50)]
    assert lengths == [50, 50, 11]


def test_hive_folders_become_columns(tmp_path: Path) -> None:
    write(tmp_path / "day=2" / "lang=en%20gb" / "x.parquet", t=["b"])
    write(tmp_path / "day=1" / "lang=__HIVE_DEFAULT_PARTITION__" / "x.parquet", t=["a"])
    files = expand([str(tmp_path)])
    assert schema(files) == pa.schema([("t", pa.string()), ("day", pa.int32()), ("lang", pa.string())])
    assert rows([str(tmp_path)]) == [
        {"row_idx": 0, "t": "a", "day": 1, "lang": None},
        {"row_idx": 1, "t": "b", "day": 2, "lang": "en gb"},
    ]
    assert rows([str(tmp_path)], ["day"])[1] == {"row_idx": 1, "day": 2}


def test_files_that_are_no_data_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", t=["a"])
    write(tmp_path / "_temporary" / "b.parquet", t=["b"])
    write(tmp_path / ".hidden.parquet", t=["c"])
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "README.md").write_text("x")
    assert [row["t"] for row in rows([str(tmp_path)])] == ["a"]


def test_column_that_one_file_lacks_is_null_there_and_types_widen(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", t=["a"], n=pa.array([1], pa.int32()))
    write(tmp_path / "b.parquet", n=pa.array([2], pa.int64()))
    assert rows([str(tmp_path)]) == [{"row_idx": 0, "t": "a", "n": 1}, {"row_idx": 1, "t": None, "n": 2}]
    assert schema(expand([str(tmp_path)])).field("n").type == pa.int64()


def test_no_columns_still_counts_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", t=["a", "b"])
    assert rows([path], []) == [{"row_idx": 0}, {"row_idx": 1}]


def test_own_row_idx_column_comes_after_ours(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", row_idx=[7])
    (batch,) = scan(expand([path]))
    assert [column.to_pylist() for column in batch.columns] == [[0], [7]]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [{"t": "2024-01-01", "n": 1}, {"t": "x\n", "n": 2.5, "late": [{"role": "user"}]}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert rows([str(path)]) == [
        {"row_idx": 0, "t": "2024-01-01", "n": 1.0, "late": None},
        {"row_idx": 1, "t": "x\n", "n": 2.5, "late": [{"role": "user"}]},
    ]


def test_json_lines_in_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines longer than a piece, columns that appear in a later piece, and a last line without its end."""
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 63)
    lines = [{"t": "a" * (number * 7), **({"late": number} if number > 20 else {})} for number in range(30)]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    assert rows([str(path)]) == [
        {"row_idx": number, "t": line["t"], "late": line.get("late")} for number, line in enumerate(lines)
    ]


def test_dates_in_some_pieces_of_json_stay_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 16)
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": "2024-01-01"}\n{"t": "soon"}\n')
    assert [row["t"] for row in rows([str(path)])] == ["2024-01-01", "soon"]


def test_csv_and_tsv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('t,n\n"two\nlines",1\nNA,2\n')
    (tmp_path / "b.tsv").write_text("t\tn\nx,y\t3\n")
    assert rows([str(tmp_path)]) == [
        {"row_idx": 0, "t": "two\nlines", "n": 1},
        {"row_idx": 1, "t": "NA", "n": 2},
        {"row_idx": 2, "t": "x,y", "n": 3},
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"", "is not a Parquet file"),
        ("a.parquet", b"PAR1 cut off", "is not a Parquet file"),
        ("a.parquet", b"PAR1" + b"\xff" * 20 + b"PAR1", "is not a valid Parquet file"),
        ("a", b"hello", "is not a Parquet file"),
        ("a.jsonl", b'{"t": 1}\n{"t": \n', "is not a valid JSON Lines file: line 2: JSON parse error: "),
        ("a.jsonl", b'{"t": 1}\n\n{"t": 2}\nbad\n', "line 4: JSON parse error: Invalid value"),
        ("a.jsonl", b'{"t": 1}\n{"t": "x"}\n', r"line 2: .* changed from number to string"),
        ("a.jsonl", b'{"t": 1}\n{"t": "x"}\n', "changed from number to string"),
        ("a.csv", b"t,n\n1,2,3\n", "is not a valid CSV file.*Expected 2 columns, got 3"),
        ("a.csv", b"t,t\n1,2\n", "two columns called 't'"),
    ],
)
def test_damaged_file_is_a_data_error_that_names_it(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"(?s){path}.*{message}|{path} has {message}"):
        rows([str(path)])


def test_damaged_page_is_a_data_error_while_scanning(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", t=["hello" * number for number in range(99)])
    raw = bytearray(Path(path).read_bytes())
    raw[4:40] = b"\xff" * 36
    Path(path).write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.parquet is not a valid Parquet file"):
        rows([path])


def test_missing_inputs_are_named(tmp_path: Path) -> None:
    for text in (str(tmp_path / "no.parquet"), str(tmp_path / "*.parquet")):
        with pytest.raises(InputMissing, match="no input matches"):
            expand([text])
    with pytest.raises(InputMissing, match="holds no Parquet"):
        expand([str(tmp_path)])


def test_file_that_vanishes_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", t=["a"])
    files = expand([path])
    Path(path).unlink()
    with pytest.raises(InputMissing, match=r"cannot read .*a\.parquet: No such file"):
        fingerprint(files)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", t=["a"])
    Path(path).chmod(0)
    with pytest.raises(InputMissing, match="Permission denied"):
        expand([path])


def test_what_cannot_be_one_input_is_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a.parquet", t=["a"])
    (tmp_path / "b.csv").write_text("t\nx\n")
    with pytest.raises(UsageError, match="given twice"):
        expand([a, str(tmp_path / "*.parquet")])
    with pytest.raises(InputMissing, match=r"cannot read zz://bucket/a.parquet: Protocol not known: zz"):
        expand(["zz://bucket/a.parquet"])
    with pytest.raises(DataError, match=r"mixes formats: .*b.csv \(CSV\) and .*a.parquet \(Parquet\)"):
        expand([str(tmp_path)])


def test_files_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", t=["a"])
    write(tmp_path / "b.parquet", t=[[1]])
    with pytest.raises(DataError, match=r"the columns of .*b\.parquet do not fit"):
        schema(expand([str(tmp_path)]))


def test_wrong_column_proposes_the_nearest(tmp_path: Path) -> None:
    files = expand([write(tmp_path / "a.parquet", body=["a"], id=[1])])
    with pytest.raises(DataError, match=r"--prompt-col: .*no column 'bdy'; did you mean 'body'\? it has: body, id"):
        require_column(files.schema, "bdy", "--prompt-col")


def test_fingerprint_changes_with_contents_and_order_but_not_with_place(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.parquet", t=["a"]), write(tmp_path / "b.parquet", t=["b"])
    first = fingerprint(expand([a, b]))
    assert list(first) == ["0 a.parquet", "1 b.parquet"]
    assert fingerprint(expand([b, a])) != first
    copy = write(tmp_path / "copy" / "a.parquet", t=["a"])
    assert fingerprint(expand([copy, b])) == first
    write(tmp_path / "b.parquet", t=["c"])
    assert fingerprint(expand([a, b])) != first


def test_fingerprint_of_a_large_file_is_its_footer_or_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_HASHED_WHOLE_BYTES", 0)
    a = write(tmp_path / "a.parquet", t=["a"])
    first = fingerprint(expand([a]))
    os.utime(a, ns=(1, 1))
    assert fingerprint(expand([a])) == first
    write(tmp_path / "a.parquet", t=["b"])
    assert fingerprint(expand([a])) != first
    text = tmp_path / "a.csv"
    text.write_text("t\na\n")
    first = fingerprint(expand([str(text)]))
    os.utime(text, ns=(1, 1))
    assert fingerprint(expand([str(text)])) != first
