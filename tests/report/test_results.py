"""What the report reads of the parts, from a disk that fails."""

import errno
from itertools import count

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import StorageFailed
from batchrun.report.results import read_results
from batchrun.store.counts import COUNTS_KEY, Counts


def test_a_part_that_cannot_be_closed_after_its_errors_is_an_error_and_not_left_to_the_collector(tmp_path, monkeypatch):
    rows = {
        "row_idx": [0, 1],
        "prompt_tokens": [0, 5],
        "completion_tokens": [0, 7],
        "finish_reason": ["error", "stop"],
        "error": [{"type": "empty_prompt", "message": "row 0: empty"}, None],
    }
    part, counts = tmp_path / "00000-0000.parquet", Counts(2, {"empty_prompt": 1})
    pq.write_table(pa.table(rows).replace_schema_metadata({COUNTS_KEY: counts.to_json()}), part)
    assert [failed.row_idx for failed in read_results([part], "", counts.errors).errors] == [0]
    opened = count()

    class Stuck(pq.ParquetFile):
        """The second one cannot be closed."""

        def __exit__(self, *args: object) -> None:
            self.close()
            if next(opened) == 1:
                raise OSError(errno.EIO, "stuck")

    monkeypatch.setattr(pq, "ParquetFile", Stuck)
    with pytest.raises(StorageFailed, match="stuck"):
        read_results([part], "", counts.errors)
