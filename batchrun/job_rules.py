"""Which options of a job go together: what is checked when all of them are known.

Every message names the options as a user types them, and what to do.
"""

from dataclasses import fields
from typing import TYPE_CHECKING

from batchrun.engine.request import SamplingParams

if TYPE_CHECKING:
    from batchrun.job import Job


def check_together(job: "Job") -> None:
    """Raises ValueError for the first options that do not."""
    _check_prompts(job)
    _check_sampling(job)
    _check_task(job)
    _check_beams(job)
    _check_ranks(job)
    _check_disaggregation(job)
    _check_run(job)


def _check_prompts(job: "Job") -> None:
    for flag, other in (("--prompt-col", job.prompt_col), ("--template", job.template)):
        if other is not None and job.messages_col is not None:
            raise ValueError(f"--messages-col and {flag} exclude each other: a prompt has one source")
    if job.chat == "off" and job.messages_col is not None:
        raise ValueError("--messages-col needs a chat template, so it cannot go with --chat off")
    if job.chat == "off" and job.chat_template is not None:
        raise ValueError("--chat-template cannot go with --chat off")


def _check_sampling(job: "Job") -> None:
    if "" in job.stop:
        raise ValueError("--stop '' would end every answer at once; leave it out")
    if any(not word.strip() for word in job.bad_words):
        raise ValueError("--bad-words '' is no word; leave it out")
    if job.repetition_min_count == 1:
        raise ValueError("--repetition-min-count 1 would end every answer at once; 2 is the least")
    if job.reasoning_end == "":
        raise ValueError("--reasoning-end '' ends no reasoning; leave it out")
    if job.min_tokens > job.max_tokens:
        raise ValueError(f"--min-tokens {job.min_tokens} is more than --max-tokens {job.max_tokens}")
    forms = ["--" + name.replace("_", "-") for name in job.sampling.constraint_names]
    if len(forms) > 1:
        raise ValueError(f"{' and '.join(forms)} exclude each other: a text has one form")
    if forms and job.ignore_eos:
        raise ValueError(f"--ignore-eos cannot go with {forms[0]}, which says where a text ends")
    if forms and job.reasoning_end is not None:
        raise ValueError(f"--reasoning-end cannot go with {forms[0]}, which the whole output follows")


def _check_task(job: "Job") -> None:
    """Raises ValueError: options of another task, or one too few."""
    owners = {"target_col": "score", "choice": "choose", "choices_col": "choose", "choice_normalise": "choose",
              "choice_prior": "choose", "pooling": "embed", "embedding_norm": "embed"}  # fmt: skip
    generated = ("params_col", "n", "num_beams", "length_penalty", "early_stopping", "logprobs", "reasoning_start",
                 "reasoning_end", *(field.name for field in fields(SamplingParams)))  # fmt: skip
    owners |= dict.fromkeys(generated, "generate")
    for name, owner in owners.items():
        if owner != job.task and getattr(job, name) != type(job).model_fields[name].default:
            raise ValueError(f"--{name.replace('_', '-')} is for --task {owner}, not {job.task}")
    if job.task == "score" and job.target_col is None:
        raise ValueError(
            "--task score needs --target-col: whose probability is wanted; --prompt-col is what stands before it"
        )
    if job.choice and job.choices_col is not None:
        raise ValueError("--choice and --choices-col exclude each other: all rows have the same choices, or their own")
    if job.task == "choose" and not job.choice and job.choices_col is None:
        raise ValueError("--task choose needs the choices: --choice for each, or --choices-col")
    if job.choice and (len(job.choice) < 2 or len({*job.choice}) < len(job.choice) or "" in job.choice):
        raise ValueError("--choice should be given twice or more, each time with another text")
    if job.task in ("score", "choose") and job.on_overlong == "truncate-right":
        raise ValueError(f"--on-overlong truncate-right would cut what --task {job.task} continues; cut left")
    if job.deterministic and job.dtype not in ("auto", "float32"):
        raise ValueError(f"--deterministic needs --dtype float32, not {job.dtype}: torch multiplies in halves")
    if job.deterministic and job.task == "embed" and job.pooling == "mean":
        raise ValueError("--pooling mean adds up what steps give it, so it cannot go with --deterministic")


def _check_beams(job: "Job") -> None:
    """Raises ValueError: options without a search that are for one, or that a search cannot heed."""
    names = (*job.sampling.unheeded_by_beams, "n", "logprobs", "reasoning_end")
    wrong = "cannot go with --num-beams, which finds the likeliest text"
    if job.num_beams == 1:
        names, wrong = ("length_penalty", "early_stopping"), "is for --num-beams above 1"
    for name in names:
        if getattr(job, name) != type(job).model_fields[name].default:
            raise ValueError(f"--{name.replace('_', '-')} {wrong}; leave one of them out")
    if job.max_num_seqs is not None and job.max_num_seqs < job.num_beams:
        raise ValueError(f"--max-num-seqs {job.max_num_seqs} has no room for {job.num_beams} beams; raise it")


def _check_ranks(job: "Job") -> None:
    """Raises ValueError: options that are for one process."""
    if job.tensor_parallel == 1:
        return
    if job.quantization != "none":
        raise ValueError(f"--quantization {job.quantization} cannot go with --tensor-parallel; leave one of them out")
    if job.workers > 1 or job.executor != "local":
        raise ValueError("--tensor-parallel cannot go with --workers or --executor ray: one engine has all ranks")
    if job.deterministic:
        raise ValueError("--deterministic cannot go with --tensor-parallel, where the ranks' sums are added up")


def _check_disaggregation(job: "Job") -> None:
    """Raises ValueError: options of a job whose rows are not handed over from one engine to another."""
    if not job.disaggregate:
        return
    if job.task != "generate":
        raise ValueError(f"--disaggregate is for --task generate; --task {job.task} has nothing to decode")
    if job.num_beams > 1:
        raise ValueError("--disaggregate cannot go with --num-beams; leave one of them out")
    if job.tensor_parallel > 1:
        raise ValueError("--disaggregate cannot go with --tensor-parallel; leave one of them out")
    if job.workers > 1 or job.executor != "local":
        raise ValueError("--disaggregate cannot go with --workers or --executor ray: it has two engines of its own")
    if job.swap_space == 0:
        raise ValueError("--disaggregate hands KV over in swap space: raise --swap-space above 0")


def _check_run(job: "Job") -> None:
    if job.long_row_tokens is not None and job.schedule != "chunked":
        raise ValueError(f"--long-row-tokens needs --schedule chunked; under {job.schedule} prompts are not mixed")
    if job.reuse is not None and job.reuse == job.output:
        raise ValueError(f"--reuse {job.reuse} is the output itself; give the output of an earlier job")
    if job.ray_address is not None and job.executor != "ray":
        raise ValueError(f"--ray-address is for --executor ray, not {job.executor}")
    if job.preemption == "swap" and job.swap_space == 0:
        raise ValueError("--preemption swap needs room to swap to: raise --swap-space above 0")
