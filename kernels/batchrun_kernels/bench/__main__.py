"""The command: `python -m batchrun_kernels.bench [OPERATION …] [--only TEXT] [--threads N] [--json FILE]`.

Exits 1 when an operation computes something else than its reference: it is said, and not timed.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from batchrun_kernels import native
from batchrun_kernels.bench.case import Case
from batchrun_kernels.bench.cases import cpu_cases
from batchrun_kernels.bench.ceiling import Ceiling, measure_cpu
from batchrun_kernels.bench.measure import CheckFailedError, check, time_ways
from batchrun_kernels.bench.report import Measured, as_json, ceiling_line, header, line


def main(arguments: list[str] | None = None) -> int:
    """Prints a line a case as it is measured; the exit code."""
    operations = list(dict.fromkeys(case.operation for case in cpu_cases()))
    options = _parser(operations).parse_args(arguments)
    try:
        native.load(native.FOLDER)
    except native.NativeUnavailableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.threads:
        torch.set_num_threads(options.threads)
    wanted = options.operations or operations
    chosen = (case for case in cpu_cases() if case.operation in wanted and options.only in case.size)
    found = show(measure(chosen, measure_cpu(), options.seconds))
    # A machine that others use gives other rates after than before.
    print(f"\nafterwards {ceiling_line(measure_cpu())}")
    if options.json:
        options.json.write_text(json.dumps(as_json(found, torch.get_num_threads()), indent=1), encoding="utf-8")
    return 1 if any(one.refusal for one in found) else 0


def measure(cases: Iterable[Case], ceiling: Ceiling, seconds: float) -> Iterator[Measured]:
    """One after another, about `seconds` for each way; what fails its check is refused."""
    for case in cases:
        prepared = case.prepare()
        try:
            error = check(prepared)
        except CheckFailedError as refusal:
            yield Measured(case, ceiling, refusal=str(refusal))
            continue
        yield Measured(case, ceiling, tuple(time_ways(prepared, seconds)), error)


def show(measured: Iterable[Measured]) -> list[Measured]:
    """Prints them as they come; all of them."""
    found: list[Measured] = []
    for one in measured:
        if not found:
            print(f"{torch.get_num_threads()} threads; {ceiling_line(one.ceiling)}")
        if not found or found[-1].case.operation != one.case.operation:
            print(f"\n{header(one)}")
        print(line(one), flush=True)
        found.append(one)
    return found


def _parser(operations: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m batchrun_kernels.bench", description=__doc__)
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=f"of {', '.join(operations)}; all of them")
    parser.add_argument("--only", default="", metavar="TEXT", help="sizes that contain it, for example 'down'")
    parser.add_argument("--threads", type=int, help="as many as torch has")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each way of each case (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the same numbers, in seconds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
