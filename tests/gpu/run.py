"""Everything that only a GPU can show, in ten minutes: what is right first, then what is fast.

    python tests/gpu/run.py [--part NAME ...] [--json FILE] [--seconds 600] [--dry-run]

needs a checkout and what pyproject.toml names, with torch for CUDA, and pytest. Each part runs in a process of its
own; one that fails or takes too long does not stop the others. Without a GPU it says so and what it would do, and runs
what a CPU can at tiny sizes, under Triton's interpreter. Exit status: 0 when everything that ran is right, 1 otherwise.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

_ROOT = Path(__file__).resolve().parents[2]
# Triton warns, and its numbers would move, where this is not set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# In the order in which most is learned if time runs out.
_PARTS = {
    "device": "device:PART",
    "suite": "suite:PART",
    "graphs": "graphs:PART",
    "engine": "engine:PART",
    "attention": "timed:ATTENTION",
    "layers": "timed:LAYERS",
    "job": "whole_job:PART",
    "cuts": "timed:CUTS",
}
for _folder in (_ROOT, _ROOT / "kernels"):
    sys.path.insert(0, str(_folder))

if TYPE_CHECKING:
    from tests.gpu.part import Part


def main() -> int:
    arguments = _parse()
    if arguments.child:
        return _child(arguments.child)
    import torch

    has_gpu = torch.cuda.is_available()
    names = arguments.part or list(_PARTS)
    if unknown := set(names) - set(_PARTS):
        raise SystemExit(f"no part {', '.join(sorted(unknown))}; there are {', '.join(_PARTS)}")
    if arguments.dry_run or not has_gpu:
        reason = "dry run" if has_gpu else f"no GPU: torch {torch.__version__} finds no CUDA device"
        print(f"{reason}. What would run, and what of it runs on a CPU:", flush=True)
        results = _dry_run(names)
    else:
        results = _on_gpu(names, arguments.seconds, arguments.json)
    _report(results, arguments.json)
    return 0 if results and all(result["is_right"] for result in results) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", help="only this part; may be given again")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--seconds", type=float, default=600, help="for everything (600)")
    parser.add_argument("--dry-run", action="store_true", help="as without a GPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _part(name: str) -> "Part":
    """Imported when it is its turn: what one part needs and the machine lacks is no matter to the others."""
    module, _, title = _PARTS[name].partition(":")
    part: Part = getattr(importlib.import_module(f"tests.gpu.{module}"), title)
    assert part.name == name, (part.name, name)
    return part


def _dry_run(names: list[str]) -> list[dict[str, Any]]:
    # Before anything imports Triton.
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from tests.gpu.part import Machine
    from tests.kernels.interpreted.rounding import repair

    repair()
    results = []
    for part in map(_part, names):
        print(f"\n{part.name}, at most {part.limit_s} s: {part.purpose}")
        for line in part.plan():
            print(f"       {line}")
        began = time.perf_counter()
        for result in part.run(Machine(torch.device("cpu"))):
            print(result, flush=True)
            results.append(result.as_dict())
        print(f"  took {time.perf_counter() - began:.1f} s on the CPU", flush=True)
    return results


def _on_gpu(names: list[str], seconds: float, file: Path | None) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    began = time.perf_counter()
    for name in names:
        since = time.perf_counter()
        try:
            found, ending = _in_child(_part(name), seconds - (since - began))
        except ImportError as error:
            found, ending = [], f"{name} cannot be imported: {error}"
        if ending:
            found.append({"part": name, "name": "process", "is_right": False, "words": ending, "numbers": {}})
            print(f"  FAIL {ending}", flush=True)
        print(f"  took {time.perf_counter() - since:.1f} s", flush=True)
        results += found
        # What is known so far is kept, however this ends.
        if file is not None:
            _write(results, file)
    return results


def _in_child(part: "Part", left_s: float) -> tuple[list[dict[str, Any]], str]:
    """What the part found, and how its process ended where that is a failure."""
    limit_s = max(0.0, min(part.limit_s, left_s))
    print(f"\n{part.name}, {limit_s:.0f} s of {left_s:.0f}: {part.purpose}", flush=True)
    ending = ""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complaints:
        child = subprocess.Popen(
            [sys.executable, __file__, "--child", part.name],
            stdout=said,
            stderr=complaints,
            start_new_session=True,
            text=True,
        )
        try:
            if child.wait(timeout=limit_s):
                ending = f"ended with {child.returncode}"
        except subprocess.TimeoutExpired:
            ending = f"ended after its {limit_s:.0f} s"
            _end(child)
        except KeyboardInterrupt:
            _end(child)
            raise
        said.seek(0)
        complaints.seek(0)
        lines, last = said.read().splitlines(), complaints.read().strip().splitlines()[-12:]
    found = [json.loads(line) for line in lines if line.startswith("{")]
    for line in lines:
        if not line.startswith("{"):
            print(line)
    if ending and last:
        ending += ": " + " | ".join(last)
    return found, ending


def _end(child: "subprocess.Popen[str]") -> None:
    """With whatever it has started itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _child(name: str) -> int:
    """Prints each result twice: for people, and as a line of JSON."""
    import torch

    from tests.gpu.part import Machine

    for result in _part(name).run(Machine(torch.device("cuda", torch.cuda.current_device()))):
        print(result)
        print(json.dumps(result.as_dict()), flush=True)
    return 0


def _report(results: list[dict[str, Any]], file: Path | None) -> None:
    timed = [result for result in results if "floor_s" in result["numbers"]]
    if timed:
        print("\n| part | kernel | us | floor, us | ratio |\n|---|---|---|---|---|")
    for result in timed:
        took_us, floor_us = (result["numbers"][name] * 1e6 for name in ("s", "floor_s"))
        what = f"{result['name']}, {result['words'].partition(';')[0]}"
        print(f"| {result['part']} | {what} | {took_us:,.1f} | {floor_us:,.1f} | {took_us / floor_us:.2f} |")
    wrong = [result for result in results if not result["is_right"]]
    print(f"\n{len(results)} results, {len(wrong)} wrong")
    for result in wrong:
        print(f"  {result['part']}, {result['name']}: {result['words']}")
    if file is not None:
        _write(results, file)


def _write(results: list[dict[str, Any]], file: Path) -> None:
    file.write_text(json.dumps({"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
