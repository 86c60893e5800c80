"""What to do: every choice that a user makes, typed, checked and frozen.

The one place where strings from outside become options. Knows neither files' contents nor models; a template
given as a file is read when the job is loaded, so that a job is complete in itself.
"""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from batchrun import presets
from batchrun.engine.request import SamplingParams
from batchrun.errors import UsageError
from batchrun.job_rules import check_together
from batchrun.option_types import (
    ChoiceNormalise,
    Deadline,
    DeviceName,
    EarlyStopping,
    JsonSchema,
    LogitBias,
    Names,
    NonemptyText,
    PrefixCaching,
    Rate,
    Seconds,
    TaskName,
    Texts,
    TokenIdList,
)
from batchrun.settings import Setting, merge, option, validated

# What the answers depend on besides the inputs, the model's files and the sampling parameters.
_ANSWER_FIELDS = (
    "tokenizer", "dtype", "chat_template", "prompt_col", "messages_col", "template", "system", "chat", "id_col",
    "params_col", "keep_cols", "limit", "on_overlong", "output_prefix", "max_model_len", "quantization",
    "kv_cache_dtype", "deterministic", "partition_by", "order", "n", "logprobs", "reasoning_start", "reasoning_end",
    "num_beams", "length_penalty", "early_stopping",
    "task", "target_col", "choice", "choices_col", "choice_normalise", "choice_prior", "pooling",
    "embedding_norm",
)  # fmt: skip
# Of these, what makes the prompts and the result's shape: jobs that differ in nothing else give equal prompts equal
# answers.
_PROMPT_FIELDS = (
    "inputs", "chat_template", "prompt_col", "messages_col", "template", "system", "chat", "id_col", "params_col",
    "keep_cols", "limit", "on_overlong", "output_prefix", "partition_by", "order", "target_col", "choices_col",
)  # fmt: skip
# What may differ when some rows run again: what is decided row by row.
CHANGEABLE = (*(field.name for field in fields(SamplingParams)), "on_overlong")
# What `tune` takes besides the model: they say what is measured.
MEASURED = ("revision", "dtype", "trust_remote_code", "device", "kv_cache_dtype", "enforce_eager")
_LONGEST_PLAIN_VALUE = 40


class Job(BaseModel):
    """One batch-inference job. Fields are named like the command's options; defaults are the command's defaults.

    `inputs` and `output` are absolute paths or URLs when the job comes from `Job.load`. A prompt comes from
    `prompt_col`, `messages_col` or `template`; with a template, `prompt_col` is what it calls `prompt`. When none is
    set, the plan looks for a column called `prompt`, `messages` or `text`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    inputs: Texts = Field(min_length=1, description="Parquet, JSONL or CSV: file, folder or glob.")
    output: str = option("Job", ..., "Folder for the result; appears when the job is complete.", "OUT", min_length=1)

    model: str | None = option("Model", None, "Hub id, local folder or .gguf file. Default: SmolLM2-135M-Instruct.")
    revision: str | None = option("Model", None, "Branch, tag or commit of a hub model.")
    tokenizer: str | None = option("Model", None, "Hub id or folder, when not the model's own.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("Model", "auto", "Type of weights and KV.")
    quantization: Literal["none", "int8"] = option(
        "Model", "none", "int8: weights in a quarter of the memory, faster on a CPU, with slightly other answers."
    )
    trust_remote_code: bool = option("Model", False, "Run code that comes with the model.")
    chat_template: str | None = option(
        "Model", None, "Jinja2 chat template (file or text) instead of the model's.", "FILE|STRING"
    )
    device: DeviceName = option("Model", "auto", "Where to compute.")

    prompt_col: str | None = option(
        "Prompts", None, "Column with the prompt text; what a template calls prompt.", "COLUMN"
    )
    messages_col: str | None = option(
        "Prompts", None, "Column with chat messages: list of role/content, or JSON.", "COLUMN"
    )
    template: str | None = option(
        "Prompts", None, "Jinja2 prompt over the row's columns (file or text).", "FILE|STRING"
    )
    system: str | None = option("Prompts", None, "System message before every prompt that has none.")
    chat: Literal["auto", "on", "off"] = option("Prompts", "auto", "Apply the model's chat template.")
    id_col: str | None = option("Prompts", None, "Column that identifies a row; must be unique.", "COLUMN")
    params_col: str | None = option("Prompts", None, "Column with a row's own sampling parameters.", "COLUMN")
    keep_cols: Names | None = option(
        "Prompts", None, "Input columns to keep, comma-separated. Default: all.", "COLUMNS"
    )
    limit: int | None = option("Prompts", None, "Only the first rows, this many.", ge=1)
    on_overlong: Literal["error", "truncate-left", "truncate-right", "fail"] = option(
        "Prompts", "error", "A prompt that does not fit: row error, cut it, or fail the job."
    )
    output_prefix: str = option("Prompts", "", "Put before the names of the columns that are added.")

    task: TaskName = option("Task", "generate", "What is asked of the model for each row.")
    target_col: str | None = option("Task", None, "score: column with the text whose probability is wanted.", "COLUMN")
    choice: Texts = option("Task", (), "choose: one of the texts to choose from (repeatable).")
    choices_col: str | None = option("Task", None, "choose: column with a row's own list of texts.", "COLUMN")
    choice_normalise: ChoiceNormalise = option(
        "Task", "none", "choose: divide a choice's log-likelihood by its length before choices are compared."
    )
    choice_prior: str | None = option(
        "Task", None, "choose: a prompt that says nothing; probabilities are relative to those behind it.", "TEXT"
    )
    pooling: Literal["last", "mean"] = option("Task", "last", "embed: the last token's hidden state, or all tokens'.")
    embedding_norm: Literal["l2", "none"] = option("Task", "l2", "embed: make every embedding of length 1, or not.")

    max_tokens: int = option("Sampling", 256, "Tokens to generate for a row, at most.", ge=1)
    min_tokens: int = option("Sampling", 0, "Tokens before which nothing stops a row.", ge=0)
    temperature: float = option("Sampling", 0.0, "0 is greedy.", ge=0)
    top_p: float = option("Sampling", 1.0, "Sample from the likeliest tokens of this total probability.", gt=0, le=1)
    top_k: int = option("Sampling", 0, "Sample from this many likeliest tokens; 0: all.", ge=0)
    min_p: float = option("Sampling", 0.0, "Least probability relative to the likeliest token.", ge=0, le=1)
    repetition_penalty: float = option("Sampling", 1.0, "Above 1: fewer tokens seen in prompt or output.", gt=0)
    presence_penalty: float = option("Sampling", 0.0, "Above 0: fewer tokens seen in the output.", ge=-2, le=2)
    frequency_penalty: float = option("Sampling", 0.0, "The same in proportion to their count.", ge=-2, le=2)
    stop: Texts = option("Sampling", (), "Text that ends the output (repeatable).")
    stop_token_ids: TokenIdList = option("Sampling", (), "Token ids that end the output, comma-separated.", "IDS")
    ignore_eos: bool = option("Sampling", False, "Go on after the model's end-of-text token.")
    seed: int = option("Sampling", 0, "Seed of the sampling.", ge=0, lt=2**63)
    json_schema: JsonSchema = option("Sampling", None, "The output is JSON of this schema (file or text).", "FILE|JSON")
    regex: NonemptyText = option("Sampling", None, "The whole output matches this regular expression.", "REGEX")
    guided_choice: Texts = option("Sampling", (), "The output is one of these texts (repeatable).")
    grammar: NonemptyText = option(
        "Sampling", None, "The output follows this grammar, in Lark's notation (file or text).", "FILE|LARK"
    )
    logit_bias: LogitBias = option("Sampling", (), "Added to a token's logit, -100 to 100 (repeatable).", "ID=BIAS")
    bad_words: Texts = option("Sampling", (), "Text whose usual tokens are never generated (repeatable).", "TEXT")
    repetition_min_count: int = option(
        "Sampling", 0, "End a row that says one thing so many times in a row; 0: never.", ge=0
    )
    repetition_max_pattern_size: int = option(
        "Sampling", 64, "Tokens of what is said again and again, at most.", ge=1, le=1024
    )
    reasoning_start: str = option("Sampling", "<think>", "What reasoning begins with, where the prompt does not.")
    reasoning_end: str | None = option(
        "Sampling", None, "What reasoning ends with, e.g. </think>: it gets a column, and stops are for the answer."
    )
    n: int = option("Sampling", 1, "Samples for each row; above 1 with a column sample_idx.", ge=1, le=10_000)
    num_beams: int = option(
        "Sampling",
        1,
        "Search for the likeliest text with so many beams, as transformers does; 1: no search.",
        ge=1,
        le=64,
    )
    length_penalty: float = option(
        "Sampling",
        1.0,
        "Of beams: the power of its length that a text's log-probability is divided by; above 0: longer texts.",
        ge=-20,
        le=20,
    )
    early_stopping: EarlyStopping = option(
        "Sampling",
        "false",
        "Of beams: end with as many texts (true), when no better one is likely (false), or when none can be (never).",
    )
    logprobs: int | None = option(
        "Sampling", None, "Columns logprob and logprobs, with so many of the likeliest tokens.", "K", ge=0, le=20
    )

    max_model_len: int | None = option("Engine", None, "Prompt and output, tokens. Default: the model's.", ge=2)
    max_num_seqs: int | None = option("Engine", None, "Rows in a step, at most. Default: 128, on a GPU 256.", ge=1)
    max_num_batched_tokens: int | None = option(
        "Engine", None, "Token budget of a step: the chunk size. Default: 512, on a GPU 8192.", ge=1
    )
    block_size: int = option("Engine", 16, "Tokens in a KV block.", ge=1)
    kv_cache_memory: ByteSize | None = option(
        "Engine", None, "KV pool, e.g. 4GiB. Default: what is free.", "SIZE", gt=0
    )
    kv_cache_dtype: Literal["auto", "float16", "float32"] = option(
        "Engine", "auto", "Type of keys and values. auto: --dtype; on a CPU float16 halves them, for rare other tokens."
    )
    gpu_memory_utilization: float = option("Engine", 0.9, "Share of the GPU's memory to use.", gt=0, le=1)
    swap_space: ByteSize | None = option("Engine", None, "Host memory for swapped KV, e.g. 2GiB; 0: none.", "SIZE")
    preemption: Literal["auto", "recompute", "swap"] = option("Engine", "auto", "How a row gives up its KV.")
    schedule: Literal["chunked", "prefill-first", "fcfs", "static"] = option(
        "Engine", "chunked", "Who gets a step's tokens: decodes and chunks of prompts, or whole prompts first."
    )
    chunk_alignment_tokens: int = option(
        "Engine", 1, "Cut prompts at multiples of this many tokens, where the budget allows.", ge=1
    )
    long_row_tokens: int | None = option(
        "Engine",
        None,
        "Prompts with more tokens to compute go one at a time, beside short ones (chunked). Default: a step's budget.",
        ge=1,
    )
    prefix_caching: PrefixCaching = option(
        "Engine", "auto", "Share the KV of equal prefixes. auto: where the plan finds enough of them to be worth it."
    )
    speculation: Literal["auto", "off"] = option(
        "Engine", "auto", "Guess tokens that stood in the row before, where a step has room; the text is the same."
    )
    enforce_eager: bool = option("Engine", False, "Decode on a GPU without device graphs.")
    tensor_parallel: int = option(
        "Engine", 1, "Processes that compute the model together, each with its share of weights and KV.", ge=1
    )
    disaggregate: bool = option(
        "Engine", False, "Compute prompts in a process of their own, which hands their KV over to the one that decodes."
    )
    deterministic: bool = option(
        "Engine", False, "A row's text depends on the row alone, to the byte, or the model is refused (CPU, float32)."
    )

    executor: Literal["local", "ray"] = option(
        "Job", "local", "Where workers run: on this machine, or on the nodes of a Ray cluster."
    )
    workers: int = option(
        "Job",
        1,
        "Engines that share the job's rows; local: one for each GPU, or processes that divide the cores.",
        ge=1,
    )
    ray_address: str | None = option(
        "Job", None, "Ray cluster to use. Default: the one that Ray finds, or one for this job.", "ADDRESS"
    )
    partition_by: str | None = option(
        "Job", None, "Input column whose values become folders of the output, COLUMN=value.", "COLUMN"
    )
    file_size: ByteSize = option("Job", ByteSize(256 << 20), "Size of a file of the output, about.", "SIZE", gt=0)
    checkpoint_every: Seconds = option("Job", 30.0, "Time between commits, e.g. 30s.", "DURATION", gt=0)
    drain_timeout: Seconds = option(
        "Job", 45.0, "Time to finish running rows after SIGTERM or Ctrl-C.", "DURATION", ge=0
    )
    deadline: Deadline | None = option(
        "Job",
        None,
        "Stop cleanly by then: so long after the start, or at a time of day, e.g. 3h or 06:00.",
        "DURATION|TIME",
    )
    wait_lock: Seconds = option("Job", 0.0, "Time to wait for another process on the same output.", "DURATION", ge=0)
    max_error_rate: Rate | None = option(
        "Job",
        None,
        "Share of failed rows above which the job exits 65, e.g. 1%. Default: no limit.",
        "RATE",
        ge=0,
        le=1,
    )
    abort_after: int | None = option(
        "Job", None, "Stop at once when this many rows have failed, and exit 65; can be resumed.", "N", ge=1
    )
    step_timeout: Seconds = option(
        "Job", 600.0, "Time after which a step that does not end is given up, exit 70; 0: never.", "DURATION", ge=0
    )
    order: Literal["input", "run"] = option(
        "Job", "input", "Rows of the result as they are in the input, or as they were answered, without a sort."
    )
    overwrite: bool = option("Job", False, "Replace the output and its job folder.")
    push_gateway: str | None = option(
        "Job", None, "Pushgateway of Prometheus that gets metrics while the job runs.", "URL", min_length=1
    )
    track: Literal["mlflow", "wandb"] | None = option(
        "Job", None, "Log options and summary there when the job is complete."
    )
    reuse: str | None = option(
        "Job", None, "Output of an earlier job: rows that it has answered are copied, not computed.", "OLD_OUT"
    )

    @classmethod
    def load(
        cls,
        options: Mapping[str, object],
        env: Mapping[str, str] | None = None,
        file: Path | None = None,
        *,
        also: Collection[str] = (),
    ) -> Self:
        """A job from named options, `BATCHRUN_…` variables, a TOML file and the preset that one of them names; the
        earlier wins.

        Relative paths start from the current folder, those in the file from the file's. `also` names settings that
        belong to the caller and are passed over.

        Raises:
            UsageError: an unknown name, a value that does not fit, or options that contradict each other.
            InputMissing: `file` cannot be read.
        """
        settings = merge({*cls.model_fields, presets.OPTION, *also}, options, env or {}, file)
        settings = presets.with_preset(settings, cls.model_fields)
        given = {name: setting for name, setting in settings.items() if name in cls.model_fields}
        values = {name: from_outside(name, setting) for name, setting in given.items()}
        for name, how in (("inputs", "give INPUT…"), ("output", "give -o OUT")):
            if not values.get(name):
                raise UsageError(f"no {name}: {how}")
        return validated(cls, values, given)

    @property
    def sampling(self) -> SamplingParams:
        """How the job's rows are sampled; other tasks than `generate` sample nothing."""
        if self.task != "generate":
            return SamplingParams(max_tokens=0)
        return SamplingParams(**{field.name: getattr(self, field.name) for field in fields(SamplingParams)})

    def fingerprint(self, *, inputs: Mapping[str, Any], model_digest: str) -> dict[str, str]:
        """What the answers depend on, each under the name that a user knows: a short value, or a hash of a long one.

        `inputs` identifies the input files' contents. Other engine and job options change no answer and are left out.
        """
        names = (*_ANSWER_FIELDS, *(field.name for field in fields(SamplingParams)))
        answers = {name: _short(getattr(self, name)) for name in names}
        return {"inputs": _short(dict(inputs)), "model": _short(model_digest), **answers}

    @classmethod
    def differing(cls, one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
        """The keys in which two fingerprints differ. An option that one does not know, being older, has its default."""

        def value(fingerprint: Mapping[str, str], key: str) -> str | None:
            usual = _short(cls.model_fields[key].default) if key in cls.model_fields else None
            return fingerprint.get(key, usual)

        return tuple(sorted(key for key in {*one, *other} if value(one, key) != value(other, key)))

    @classmethod
    def differing_answers(cls, one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
        """Those of them with which equal prompts may get other answers."""
        return tuple(key for key in cls.differing(one, other) if key not in _PROMPT_FIELDS)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        check_together(self)
        return self


def from_outside(name: str, setting: Setting) -> object:
    """The value with relative paths made absolute and template files read."""
    value = setting.value
    match name, value:
        case "inputs", str():
            return (_absolute(value, setting.base),)
        case "inputs", list() | tuple():
            return tuple(_absolute(item, setting.base) if isinstance(item, str | Path) else item for item in value)
        case (("output" | "reuse"), str() | Path()):
            return _absolute(value, setting.base)
        case (("model" | "tokenizer"), str() | Path()):
            return _local_model(value, setting.base)
        case (("template" | "chat_template"), str() | Path()):
            return _template_text(str(value), setting)
        case "json_schema", str() | Path() if not str(value).lstrip().startswith("{"):
            return _file_text(str(value), setting, "a JSON schema")
        case "grammar", str() | Path() if ":" not in str(value):
            return _file_text(str(value), setting, "a grammar (it has no rule)")
    return value


def _absolute(path: str | Path, base: Path) -> str:
    """The path from the root, links kept; a URL as it is."""
    text = str(path)
    return text if "://" in text else os.path.normpath(base / Path(text).expanduser())


def _local_model(model: str | Path, base: Path) -> str:
    """An absolute path when `model` is one on this machine or can be nothing else; otherwise a name, as given."""
    local = _absolute(model, base)
    looks_local = isinstance(model, Path) or model.startswith((".", "~", "/")) or model.endswith(".gguf")
    return local if looks_local or Path(local).exists() else str(model)


def _template_text(template: str, setting: Setting) -> str:
    """The template itself, read from its file when it is not written out.

    A template without `{{` or `{%` would be the same prompt for every row, so it can only be a file's name.
    """
    if "{{" in template or "{%" in template:
        return template
    return _file_text(template, setting, "a template (it has no {{ … }})")


def _file_text(path: str, setting: Setting, otherwise: str) -> str:
    """The file's content; `otherwise` is what the path would have been if it were written out."""
    try:
        return Path(_absolute(path, setting.base)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{setting.label}: {path[:80]!r} is neither a readable file nor {otherwise}") from error


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    return text if len(text) <= _LONGEST_PLAIN_VALUE else hashlib.sha256(text.encode()).hexdigest()[:16]
