"""batchrun as a model of EleutherAI's evaluation harness, which knows it as `batchrun`.

The harness tokenises and cuts as it does for its own transformers models; what is left are token ids, and the requests
of a call are one job over them, so that beginnings which tasks, documents and choices share are computed once.

    from batchrun.harness import BatchrunLM
    lm_eval.simple_evaluate(model=BatchrunLM(pretrained="HuggingFaceTB/SmolLM2-360M"), tasks=["hellaswag"])
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from batchrun import api
from batchrun.checkpoint import cache_folder, load_tokenizer, resolve
from batchrun.errors import DataError, UsageError
from batchrun.job import Job
from batchrun.observe.log import LOGGER
from batchrun.observe.progress import make_observer
from batchrun.plan.fit import effective_max_model_len
from batchrun.tokenizer import HFTokenizer

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise UsageError(
        f"EleutherAI's harness is not installed ({error}): pip install 'batchrun[lm-eval]', or pip install lm-eval"
    ) from error

_USUAL_MAX_TOKENS = 256
# What it may be told, beside what it says itself: the names of options of a job.
_JOB_OPTIONS = frozenset(
    name
    for name, field in Job.model_fields.items()
    if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("group") in ("Model", "Engine")
) - {"model", "max_model_len"}
# What a task may say of sampling, and what that is called in a job.
_SAMPLING = {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens", "seed")
} | {"min_new_tokens": "min_tokens"}
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_IGNORED = {"do_sample", "use_cache", "pad_token_id"}
Pair = tuple[Any, list[int], list[int]]  # what it was made of, the context's tokens, the continuation's


@register_model("batchrun")
class BatchrunLM(TemplateLM):  # type: ignore[misc]
    """A model under the harness; each kind of request is one job, and a job loads the model.

    `pretrained` is what `--model` is to a job (None: the embedded model), `max_length` its `--max-model-len`, and
    `options` are others of its *Model* and *Engine* options. The remaining arguments mean what they mean to the
    harness's own models; its `batch_size` and `max_batch_size` mean nothing here.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        max_length: int | None = None,
        max_gen_toks: int = _USUAL_MAX_TOKENS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        """Raises BatchrunError: no such model or option, or a model without a tokenizer of transformers."""
        super().__init__()
        for name in sorted({*options} - _JOB_OPTIONS):
            known = ", ".join(sorted(_JOB_OPTIONS))
            raise UsageError(f"model_args: {name!r} is no option of batchrun under the harness; there are {known}")
        given = {"model": pretrained, "max_model_len": max_length, "device": _device(device), **options}
        self._options = {name: value for name, value in given.items() if value is not None}
        if think_end_token is not None and not isinstance(think_end_token, str):
            raise UsageError(f"model_args: think_end_token={think_end_token!r} should be a text, such as </think>")
        job = Job.load({"inputs": "-", "output": "-", **self._options})
        checkpoint = resolve(
            job.model, revision=job.revision, cache=cache_folder(), trust_remote_code=job.trust_remote_code
        )
        tokenizer = load_tokenizer(
            checkpoint,
            tokenizer=job.tokenizer,
            chat_template=job.chat_template,
            trust_remote_code=job.trust_remote_code,
        )
        if not isinstance(tokenizer, HFTokenizer):
            raise UsageError(f"the model {checkpoint.spec.name} has no tokenizer of transformers; choose another")
        self.tokenizer = _putting_bos(tokenizer.native, add_bos_token, trust_remote_code=job.trust_remote_code)
        self.max_length = effective_max_model_len(job, checkpoint.spec)
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._think_end_token = think_end_token
        self._chat_arguments = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._chat_arguments["enable_thinking"] = enable_thinking

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        bos = self.tokenizer.bos_token_id
        return int(bos) if bos is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """With what the tokenizer puts around a text, unless told otherwise or the text begins with it."""
        special = self._add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            special = False
        told = {} if special is None else {"add_special_tokens": special}
        return list(self.tokenizer.encode(string, **told))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the model's text; without system messages where its template refuses them."""
        from jinja2 import TemplateError

        how = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **self._chat_arguments,
        }
        try:
            return str(self.tokenizer.apply_chat_template(chat_history, **how))
        except TemplateError:
            others = [message for message in chat_history if message["role"] != "system"]
            return str(self.tokenizer.apply_chat_template(others, **how))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text, in windows of `max_length`."""
        texts = [request.args[0] for request in requests]
        windows = [[*map(utils.make_disjoint_window, self._windows(text))] for text in texts]
        pairs: list[Pair] = [(None, *window) for own in windows for window in own]
        found = iter(self._scored(pairs, is_quiet=disable_tqdm))
        sums = [sum((next(found)[0] for _ in own), 0.0) for own in windows]
        for text, result in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), result)
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model says behind each context, up to the first of its stop texts."""
        rows = [self._generation(context, arguments) for context, arguments in (request.args for request in requests)]
        table = pa.table(
            {
                "prompt": pa.array([ids for ids, _ in rows], pa.list_(pa.int32())),
                "params": pa.array([json.dumps(params) for _, params in rows], pa.string()),
            }
        )
        answers = self._answered("generate", table, is_quiet=disable_tqdm, params_col="params")
        texts = []
        for request, (_, params), answer in zip(requests, rows, answers.column("text").to_pylist(), strict=True):
            texts.append(self._without_thinking(answer, params["stop"]))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _loglikelihood_tokens(
        self, requests: list[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found = self._scored(requests, is_quiet=disable_tqdm)
        for (given, _, _), result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", given, result)
        return found

    def _scored(self, pairs: Sequence[Pair], *, is_quiet: bool) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether no other token was likelier at any place of it."""
        kind = pa.list_(pa.int32())
        columns = {
            "prompt": pa.array([context for _, context, _ in pairs], kind),
            "target": pa.array([continuation for _, _, continuation in pairs], kind),
        }
        how = {"target_col": "target", "on_overlong": "truncate-left"}
        rows = self._answered("score", pa.table(columns), is_quiet=is_quiet, **how)
        logprobs, greedy = (rows.column(name).to_pylist() for name in ("target_logprob", "target_is_greedy"))
        return list(zip(logprobs, greedy, strict=True))

    def _answered(self, task: str, table: pa.Table, *, is_quiet: bool, **options: Any) -> pa.Table:
        """The table with the answers. Raises BatchrunError: also when a single row fails."""
        if not table.num_rows:
            return pa.table({name: [] for name in ("text", "target_logprob", "target_is_greedy")})
        run = {"score": api.score, "generate": api.generate}[task]
        observer = make_observer("none" if is_quiet else "auto", sys.stderr, LOGGER, time.monotonic)
        try:
            return run(
                table, observe=observer, prompt_col="prompt", keep_cols=[], max_error_rate=0, **options, **self._options
            )
        finally:
            observer.close()

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        ids, length = self.tok_encode(text), self.max_length
        return list(utils.get_rolling_token_windows(ids, self.prefix_token_id, max_seq_len=length, context_len=1))

    def _generation(self, context: str, arguments: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Tokens and parameters of one request. Raises UsageError: an argument that means nothing here."""
        params: dict[str, Any] = {"max_tokens": self.max_gen_toks, "temperature": 0.0}
        until = arguments.get("until") or []
        stop = [until] if isinstance(until, str) else list(until)
        params["stop"] = [text for text in stop if text]
        for name in reversed(_MAX_TOKENS):
            if arguments.get(name) is not None:
                params["max_tokens"] = int(arguments[name])
        for name, value in arguments.items():
            if name in _SAMPLING:
                params[_SAMPLING[name]] = value
            elif name not in {"until", *_MAX_TOKENS, *_IGNORED}:
                raise UsageError(f"generation argument {name!r} is none of batchrun's; leave it out of the task")
        if arguments.get("do_sample") is False:
            params["temperature"] = 0.0
        room = self.max_length - params["max_tokens"]
        if room < 1:
            raise DataError(
                f"max_gen_toks {params['max_tokens']:,} leaves no room for a prompt in the model's {self.max_length:,} "
                "tokens; lower it"
            )
        return self.tok_encode(context)[-room:], params

    def _without_thinking(self, text: str, stop: Sequence[str]) -> str:
        """The answer behind the model's thoughts, up to the first stop text."""
        if self._think_end_token is not None:
            text = text.split(self._think_end_token)[-1].lstrip()
        for end in stop:
            text = text.split(end)[0]
        return text


def _putting_bos(tokenizer: Any, add_bos_token: bool | None, *, trust_remote_code: bool) -> Any:
    """The tokenizer as it is where it puts BOS before texts, or does not; None: as it does by itself."""
    if add_bos_token is None:
        return tokenizer
    from transformers import AutoTokenizer

    told = {"add_bos_token": add_bos_token, "trust_remote_code": trust_remote_code}
    changed = AutoTokenizer.from_pretrained(tokenizer.name_or_path, **told)
    changed.chat_template = tokenizer.chat_template
    return changed


def _device(device: str | None) -> str | None:
    """A job's device. The harness says `cuda` where nobody has said anything, and means a GPU if there is one."""
    return "auto" if device is not None and device.startswith("cuda") else device
