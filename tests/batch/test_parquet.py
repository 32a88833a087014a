"""Parquet files in place of JSONL: for the Batch API, and for `run_batch`."""

from __future__ import annotations

import io
import json
import random
import resource
import tempfile

import openai
import pytest

from cosched.batch.config import QuotaConfig
from cosched.batch.jsonl.errors import JobFileError
from cosched.batch.jsonl.parquet import ParquetRows, TooLargeError
from cosched.batch.storage import FolderStorage
from cosched.run_batch import main as run_batch
from tests.batch.api import line, lines
from tests.request_lines import error_of

pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow (cosched[parquet])")
pq = pytest.importorskip("pyarrow.parquet")


def parquet(rows, **options):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, write_statistics=False, **options)
    file.seek(0)
    return file


def decoded(content, **limits):
    """The lines, as the decoder writes them."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        with ParquetRows(file, **limits) as rows:
            return list(iter(lambda: rows.readline(-1), b""))


def upload(api, file):
    return api.files.create(file=("in.parquet", file), purpose="batch")


def run(api, file):
    return api.wait(api.start(upload(api, file).id))


def test_bodies_may_be_structs(api, stand_in):
    rows = lines(300)
    rows[7]["body"]["stop"] = ["x"]  # which the others have as null
    assert api.outcome(run(api, parquet(rows))) == {f"c{n}": f"to c{n}" for n in range(300)}
    assert len(stand_in.asked) == 300


def test_bodies_may_be_json_of_several_lines(api):
    rows = [
        {**line(name), "body": json.dumps({"prompt": name}, indent=1), "note": 1} for name in "ab"
    ]
    assert api.outcome(run(api, parquet(rows))) == {"a": "to a", "b": "to b"}


def test_what_is_kept_is_jsonl_without_the_nulls(api):
    rows = [line("a"), line("b")]
    rows[1]["body"]["messages"] = [{"role": "user", "name": None}]
    rows[1]["body"]["stop"] = ["x", None]
    uploaded = upload(api, parquet(rows))
    kept = api.files.content(uploaded.id).text
    rows[1]["body"]["messages"] = [{"role": "user"}]
    assert [json.loads(one) for one in kept.splitlines()] == rows
    assert (uploaded.bytes, uploaded.filename) == (len(kept.encode()), "in.parquet")


def test_wrong_rows_are_reported_by_number(api):
    bodies = ['{"prompt": "a"}', "{no", "[]", '{"prompt": "d"}', None]
    rows = [{**line(f"c{n}"), "body": body} for n, body in enumerate(bodies)]
    rows[3]["custom_id"] = None
    failed = run(api, parquet(rows))
    found = [(fault.line, fault.code) for fault in failed.errors.data]
    missing = "missing_required_parameter"
    assert found == [(2, "invalid_json_line"), (3, "invalid_body"), (4, missing), (5, missing)]


def test_files_that_are_no_parquet_are_refused(api, folder):
    whole = parquet([line("a")]).getvalue()
    for content in (b"PAR1", whole[:-20], b"PAR1" + b"\xff" * (len(whole) - 8) + b"PAR1"):
        with pytest.raises(openai.BadRequestError, match="the Parquet file cannot be read"):
            upload(api, io.BytesIO(content))
    with pytest.raises(openai.BadRequestError, match="no column url and no body; each row has"):
        upload(api, parquet([{"custom_id": "a", "method": "POST"}]))
    assert not list((folder / "files").iterdir())


@pytest.mark.parametrize("stand_in", [{"max_lines": 5, "max_file_mb": 0.01}], indirect=True)
def test_limits(api, folder):
    with pytest.raises(openai.BadRequestError, match=r"5 lines .* has 6 rows"):
        upload(api, parquet(lines(6)))
    # Small as Parquet, where a text is held once, and too large when it is written out.
    rows = [{**line(f"c{n}"), "body": json.dumps({"prompt": "x" * 4000})} for n in range(3)]
    with pytest.raises(openai.APIStatusError, match="as JSONL, row 3 exceeds") as error:
        upload(api, parquet(rows))
    assert error.value.status_code == 413
    assert not list((folder / "files").iterdir())


@pytest.mark.parametrize("stand_in", [{"quota": QuotaConfig(max_stored_mb=0.1)}], indirect=True)
def test_a_file_is_decoded_no_further_than_the_quota_goes(api, folder, monkeypatch):
    monkeypatch.setattr("cosched.batch.files._BLOCK_BYTES", 10_000)
    written = []
    write = FolderStorage.write

    def counted(self, name, blocks):
        return write(self, name, (written.append(len(block)) or block for block in blocks))

    monkeypatch.setattr(FolderStorage, "write", counted)
    rows = [{**line(f"c{n}"), "body": json.dumps({"prompt": "x" * 4000})} for n in range(500)]
    with pytest.raises(openai.RateLimitError, match=r"100000 bytes more.* 101000 are too many"):
        upload(api, parquet(rows))
    assert sum(written) == 90_000 and not list((folder / "files").iterdir())


def test_without_pyarrow_it_is_said_what_is_missing(api, monkeypatch, tmp_path):
    (tmp_path / "pyarrow.py").write_text("raise ImportError('no')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(openai.BadRequestError, match=r"pip install 'cosched\[parquet\]'"):
        upload(api, parquet([line("a")]))


TEXT = "A" * 50_000_000


def bomb(column, value):
    """A file of a few kilobytes, whose `column` holds the large value once for all of its rows."""
    row = {**line("a"), "body": "{}", column: value}
    fields = [(name, pa.large_string()) for name in ("custom_id", "method", "url")]
    kind = pa.struct([("p", pa.list_(pa.large_string()))]) if column == "body" else pa.string()
    table = pa.Table.from_pylist([row] * 2, pa.schema([*fields, ("body", kind)]))
    file = io.BytesIO()
    pq.write_table(table, file, write_statistics=False, compression="zstd")
    return file.getvalue()


@pytest.mark.parametrize("column", ["custom_id", "body"])
def test_a_file_that_decodes_to_more_than_its_budget_takes_memory_of_another_process(column):
    content = bomb(column, {"p": [TEXT]} if column == "body" else TEXT)
    assert len(content) < 50_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TooLargeError, match="row 1 of the Parquet file takes more than 64 MB"):
        decoded(content, memory_mb=64)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_a_row_group_of_many_rows_is_decoded_a_few_rows_at_a_time():
    # Fixed chance, so that it cannot be compressed: 60 MB.
    words = random.Random(0)
    rows = [line(f"c{n}", words.randbytes(1500).hex()) for n in range(20_000)]
    content = parquet(rows, use_dictionary=False).getvalue()
    assert len(decoded(content, memory_mb=64)) == 20_000


def test_a_damaged_row_group_is_named_by_the_row_before_it():
    rows = lines(200)
    assert len(decoded(parquet([line("a")]).getvalue())) == 1
    content = parquet(rows, row_group_size=100, compression="none", use_dictionary=False)
    metadata = pq.ParquetFile(content).metadata
    start = metadata.row_group(1).column(0).data_page_offset
    damaged = bytearray(content.getvalue())
    damaged[start : start + 40] = b"\xff" * 40
    with pytest.raises(JobFileError, match="cannot be read after row 96"):
        decoded(damaged)


def test_run_batch_gives_its_rows_to_the_server(api, tmp_path):
    path, out = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    path.write_bytes(parquet([line("a"), line("b"), {**line("c"), "method": "GET"}]).getvalue())
    assert run_batch(["-i", str(path), "--validate"]) == 1
    call = ["-i", str(path), "-o", str(out), "--base-url", api.url, "--api-key", "key"]
    assert run_batch([*call, "--via", "batches"]) == 1
    answers = [json.loads(one) for one in out.read_text().splitlines()]
    assert sorted(one["custom_id"] for one in answers) == ["a", "b"]
    [error] = (tmp_path / "out.jsonl.errors.jsonl").read_text().splitlines()
    assert (json.loads(error)["line"], error_of(json.loads(error))["code"]) == (3, "invalid_method")
