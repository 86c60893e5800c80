"""Inputs, templates and model folders that somebody hostile has made: refused or harmless."""

import json
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.checkpoint import resolve
from batchrun.errors import DataError, InputMissing, ModelUnavailable, RowError
from batchrun.plan.template import TemplatePrompt
from batchrun.store.layout import Layout
from batchrun.store.status import status
from tests.run.conftest import EchoJob

ROWS = pa.record_batch({"row_idx": [0], "s": ["text"], "l": [[1, 2]]})


@pytest.mark.parametrize(
    "template",
    [
        "{{ s.__class__.__mro__[1].__subclasses__() }}",
        "{{ s | attr('__class__') | attr('__mro__') }}",
        "{{ ('{0.__class__.__init__}').format(s) }}",
        "{{ ('{a.__class__}').format_map({'a': s}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ joiner.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}{{ x }}",
        "{{ l.append(3) }}",
        "{{ row.clear() }}",
        "{% for i in range(999999999) %}x{% endfor %}",
    ],
)
def test_a_template_that_reaches_for_more_than_its_row_is_refused_or_fails_on_every_row(template):
    try:
        (outcome,) = TemplatePrompt(template, ROWS.schema).read(ROWS)
    except DataError:
        return
    assert isinstance(outcome, RowError), outcome
    assert outcome.type == "template_error"


def hostile_model(folder: Path, config: dict[str, object]) -> Path:
    """A model folder whose own code would leave a file behind if anybody ran it."""
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(folder / 'was here')!r}, 'w')\nclass Evil: pass\n")
    auto_map = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "evil.Evil")
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    return folder


@pytest.mark.parametrize("model_type", ["evil", "llama"])
def test_code_that_comes_with_a_model_does_not_run(tmp_path, model_type):
    llama = {
        "architectures": ["LlamaForCausalLM"], "model_type": model_type, "hidden_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 67, "max_position_embeddings": 256,
    }  # fmt: skip
    folder = hostile_model(tmp_path / "model", llama)
    with suppress(ModelUnavailable):
        resolve(str(folder), revision=None, cache=tmp_path / "cache", trust_remote_code=False)
    assert not (folder / "was here").exists()


NAMES = ["../../up", "/etc/passwd", "\x1b[2Jx", "a\nb", "part-00000.parquet", "..", ""]


def test_columns_with_names_like_paths_and_escape_codes_are_columns_and_nothing_else(tmp_path):
    job = EchoJob(tmp_path / "deep" / "er", ["one", "two"])
    job.folder.mkdir(parents=True)
    columns = {name: [f"{name} 1", f"{name} 2"] for name in NAMES}
    pq.write_table(pa.table({"prompt": job.prompts, **columns}), job.source)
    before = {path for path in tmp_path.rglob("*") if job.folder not in path.parents}
    done = job.call("submit", "--prompt-col", "prompt", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    assert [row[name] for row in job.rows() for name in NAMES] == [f"{name} {n}" for n in (1, 2) for name in NAMES]
    assert {path for path in tmp_path.rglob("*") if job.folder not in path.parents} == before
    assert {path.name for path in job.folder.iterdir()} == {"input.parquet", "out", "out.batchrun"}


def test_an_unknown_name_with_escape_codes_is_shown_harmless(echo_job):
    refused = echo_job(3).call("submit", "--prompt-col", "\x1b[2J\x1b]0;owned\x07")
    assert refused.returncode == 65
    assert not {"\x1b", "\x07"} & set(refused.stderr)


def test_an_input_that_leads_out_of_its_folder_by_a_dangling_link_is_an_input_that_is_missing(echo_job):
    job = echo_job(3)
    job.source.unlink()
    job.source.symlink_to("../../nowhere")
    with pytest.raises(InputMissing):
        job.submit()


@pytest.mark.parametrize(
    "content", ['{"pid": "1; rm", "host": 7}', '{"pid": 99999999999999999999, "host": "h"}', "[]", "\x1b"]
)
def test_a_forged_holder_neither_breaks_status_nor_is_believed(echo_job, content):
    job = echo_job(3)
    job.submit()
    at = Layout(job.out)
    at.lock.write_text("forged")
    at.holder.write_text(content)
    assert status(job.out).status == "completed"
    assert job.submit().already_complete
