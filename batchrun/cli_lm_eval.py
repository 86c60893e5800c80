"""The command of EleutherAI's harness, which finds the model `batchrun` when it is called from here."""

import sys

import click


@click.command(
    name="lm-eval", add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@click.argument("arguments", metavar="...", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """EleutherAI's harness: its command line, with --model batchrun.

    \b
    Example:
      batchrun lm-eval run --model batchrun --model_args pretrained=HuggingFaceTB/SmolLM2-360M --tasks hellaswag
    """
    # It is registered by being imported.
    import batchrun.harness  # noqa: F401

    from lm_eval.__main__ import cli_evaluate  # isort: skip

    sys.argv = ["lm-eval", *arguments]
    cli_evaluate()
