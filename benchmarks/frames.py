"""Measure the deepest stack of contaccum functions in a training step of each method and in one `evaluate` call.

    python benchmarks/frames.py [--json OUT] [--quick]

Frames of libraries and of comprehensions, which Python 3.12 inlines, are not counted. A step is measured from
`Engine.begin_step` to `Bank.end_step`, with `train(config)` as its first frame; functions of other threads are not followed.
--quick measures one method.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from common import make_parser, publish, table

import contaccum
from contaccum.config import METHOD_SPECS, from_mapping
from contaccum.training.loop import train

PACKAGE = str(Path(contaccum.__file__).parent)
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
DEMO = str(Path(__file__).parent.parent / "data" / "demo")


class Frames:
    """Profiler that finds the deepest chain of calls between functions of the package, and their files."""

    def __init__(self, begin: str = "") -> None:
        """begin: count chains between a call of this function and a call of ``end_step``. Empty: count all chains."""
        self.begin, self.counting = begin, not begin
        self.deepest: list[str] = []
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if self.begin and frame.f_code.co_name in (self.begin, "end_step"):
            self.counting = frame.f_code.co_name == self.begin
        if not self.counting:
            return
        self.files.add(frame.f_code.co_filename)
        chain, above = [], frame
        while above is not None:
            if above.f_code.co_filename.startswith(PACKAGE) and above.f_code.co_name not in COMPREHENSIONS:
                chain.append(above.f_code.co_name)
            above = above.f_back  # type: ignore[assignment]
        if len(chain) > len(self.deepest):
            self.deepest = chain[::-1]


def measure(name: str, call: Callable[[], object], begin: str = "") -> dict[str, Any]:
    """Call ``call`` once; return the depth and the functions of the deepest stack, and the number of files."""
    frames = Frames(begin)
    sys.setprofile(frames)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {
        "call": name,
        "depth": len(frames.deepest),
        "files": len(frames.files),
        "deepest chain": " > ".join(frames.deepest),
    }


def main() -> None:
    args = make_parser(__doc__, model=False).parse_args()
    methods = ["cont_cache"] if args.quick else list(METHOD_SPECS)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in methods:
            config = from_mapping(
                {
                    "method": method,
                    "output_dir": f"{folder}/{method}",
                    "model": {"name": "tiny", "tiny_width": 32, "tiny_layers": 1, "tiny_vocabulary": 500},
                    "data": {"train": DEMO, "hard_negatives": 1},
                    "batch": {"global_batch_size": 16, "micro_batch_size": 4},
                    "bank": {"size": 48, "age_decay": 0.1},
                    "optim": {"max_steps": 6},
                    "run": {"device": "cpu"},
                }
            )
            rows.append(measure(f"step of {method}", lambda config=config: train(config), "begin_step"))
        model = f"{folder}/{methods[-1]}/model"
        rows.append(measure("evaluate", lambda: contaccum.evaluate(model, DEMO, "dev")))
    intro = "Functions of the package on one stack; the targets are 12 for a step and 11 for `evaluate`."
    cells = table(list(rows[0]), [list(row.values()) for row in rows])
    publish(args, "Frames", [intro, cells], {"rows": rows})


if __name__ == "__main__":
    main()
