"""The command line."""

import sys

from lm_eval.api.registry import MODELS


def cli_evaluate():
    print(sys.argv, sorted(MODELS))
