"""Check and measure contaccum on a GPU: three parts of at most 9 minutes, each a list of
independent steps.

    bash benchmarks/gpu_suite.sh OUT [--part 1|2|3] [--step NAME] [--quick] [--device cpu]
        [--minutes 9]

Every step is a process with a log, OUT/STEP.log, and its figures, OUT/STEP.json. OUT/partN.json
lists the steps of a part with their results, OUT/partN.log what the part printed. A part or a step
that needs a missing package is skipped. Imports only the standard library, so that it runs without
torch.
"""

import argparse
import datetime
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PART_MINUTES = 9
LEAST_SECONDS = 5  # a step does not start with less time left
SKIPPED = 77  # exit code of a step that says why it does not run here
PACKAGES = (
    "datasets", "filelock", "jinja2", "msgspec", "numpy", "psutil",
    "pytrec_eval", "regex", "requests", "safetensors", "scipy", "torch", "tqdm", "transformers",
    "yaml",
)  # fmt: skip
"""Modules that every step imports."""
PYTHON = sys.executable


@dataclass(frozen=True)
class Step:
    """One process of the suite."""

    part: int
    name: str
    command: list[str]
    needs: tuple[str, ...] = ()
    """Modules that other steps do not import."""
    most: int = 240
    """Seconds after which the step is stopped, if the part does not end before."""


@dataclass(frozen=True)
class Result:
    """Outcome of a step, as written to partN.json."""

    part: int
    name: str
    state: str  # passed, failed, skipped or stopped
    seconds: float
    processor_seconds: (
        float  # of all processes of the step; on a busy machine far below ``seconds``
    )
    reason: str  # last line of the log, or why the step did not run
    command: str


def make_steps(out: Path, device: str, quick: bool) -> list[Step]:
    """Return all steps; ``quick`` reduces their sizes."""
    made = out / ("made-quick" if quick else "made")
    model, data = str(made / "model"), str(made / "data")
    precision = "bf16" if device == "auto" else "fp32"
    reduced = ["--quick"] if quick else []

    def script(
        part: int, name: str, file: str, *options: str, most: int = 240, needs: tuple[str, ...] = ()
    ) -> Step:
        given = ["--json", str(out / f"{name}.json"), "--device", device, *reduced, *options]
        return Step(part, name, [PYTHON, f"benchmarks/{file}.py", *given], needs, most)

    def check(name: str, most: int = 120) -> Step:
        options = ["--check", name, "--model", model, "--data", data]
        return script(1, name, "gpu_checks", *options, most=most)

    steps = (
        [Step(0, "made", [PYTHON, "benchmarks/made.py", str(made), *reduced])]
        if not made.is_dir()
        else []
    )
    # only these files: tests of other packages, which may be missing here, cannot be collected
    files = [
        str(file)
        for file in sorted(ROOT.glob("tests/*/test_*.py"))
        if "mark.gpu" in file.read_text()
    ]
    tests = [PYTHON, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "gpu", *files]
    steps += [
        Step(1, "doctor", [PYTHON, "-m", "contaccum", "doctor"], most=100),
        Step(1, "tests", tests, ("pytest",), 200),
    ]
    steps += [check(name) for name in ("precision", "shrink", "resume", "stalls")]
    texts = ["--model", model, "--real_texts", data, "--precision", precision]
    for pairs in (8,) if quick else (8, 64):
        sizes = [
            "--micro", str(pairs), "--pairs", "256", "--sizes", "1024", "16384", "131072",
            "--repeats", "3",
        ]  # fmt: skip
        steps.append(script(2, f"methods_{pairs}", "methods", *texts, *sizes, most=170))
    tokens = ["--tokens", "32768", "--pairs", "256", "--sizes", "1024", "--repeats", "3"]
    tokens += ["--kernels", "15"]
    steps.append(script(2, "methods_tokens", "methods", *texts, *tokens, most=60))
    steps.append(script(2, "defaults", "defaults", "--model", model, "--data", data, most=100))
    steps.append(
        script(
            2, "peers", "peers", *texts, "--token_budget", most=140,
            needs=("sentence_transformers",),
        )
    )  # fmt: skip
    steps.append(script(2, "plan", "plan_error", "--model", model, "--data", data, most=200))
    encoding = ["--model", model, "--data", data, "--repeats", "3"]
    steps.append(
        script(3, "encode", "encode", *encoding, most=90, needs=("sentence_transformers",))
    )
    steps.append(script(3, "search", "search", "--repeats", "3", most=120, needs=("beir",)))
    return [*steps, study(out, device, quick)]


def study(out: Path, device: str, quick: bool) -> Step:
    """Return a comparison of the methods on invented words."""
    # not at the top: an interpreter with the standard library alone does not find it
    from invented_set import write_invented_set

    methods, seeds = (
        ("grad_accum,cont_accum", "1")
        if quick
        else ("grad_accum,grad_cache,cont_accum,cont_cache", "3")
    )
    short = (
        [
            "--optim.max_steps", "4", "--model.tiny_width", "32", "--model.tiny_vocabulary", "300",
            "--baselines", "none",
        ]
        if quick
        else []
    )  # fmt: skip
    call = [
        PYTHON, "-m", "contaccum", "compare", "--config", "configs/study/demo.yaml",
        "--data.train", str(write_invented_set(out / "invented")), "--methods", methods,
        "--seeds", seeds,
    ]  # fmt: skip
    plain = ["--replay.share", "1", "--optim.epochs", "5"]  # fmt: skip
    place = ["--output_dir", str(out / "study"), "--run.device", device, "--run.save_steps", "0"]
    return Step(3, "study", [*call, *place, *plain, *short], most=60 * PART_MINUTES)


def run_step(step: Step, out: Path, end: float, stretch: float = 1) -> Result:
    """Run one step, at most until ``end`` and for ``stretch`` times its own limit; never raise for
    its failure."""
    start, used = time.monotonic(), processor_seconds()

    def result(state: str, reason: str) -> Result:
        seconds, own = (
            round(now - then, 1)
            for now, then in ((time.monotonic(), start), (processor_seconds(), used))
        )
        return Result(step.part, step.name, state, seconds, own, reason, shlex.join(step.command))

    if missing := [name for name in step.needs if importlib.util.find_spec(name) is None]:
        return result("skipped", f"needs {', '.join(missing)}")
    limit = min(stretch * step.most, end - start)
    if limit < LEAST_SECONDS:
        return result("skipped", "the time of this part is over")
    log = out / f"{step.name}.log"
    paths = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths), "PYTHON": PYTHON, "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    with log.open("w") as file:
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=os.environ | variables, stdout=file,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            stop(process)
            return result("stopped", f"after {limit:.0f} s; see {log}")
        except BaseException:
            stop(process)
            raise
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip()[:300] if lines else ""
    if code == SKIPPED:
        return result("skipped", last)
    return result("passed", last) if code == 0 else result("failed", f"exit code {code}: {last}")


def processor_seconds() -> float:
    times = os.times()  # a step's processes count when they have ended
    return times.children_user + times.children_system


def stop(process: subprocess.Popen) -> None:
    """End a step and every process that it started."""
    for number in (15, 9):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run_part(part: int, out: Path, args: argparse.Namespace) -> bool:
    """Run the steps of a part.

    Write their results to partN.json and partN.log. Return whether no step failed.
    """
    about = {
        "part": part,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(sys.argv),
    }
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    results: list[Result] = []
    end = time.monotonic() + 60 * args.minutes
    with (out / f"part{part}.log").open("w", buffering=1) as log:

        def say(text: str) -> None:
            print(text, flush=True)
            log.write(text + "\n")

        def write_results() -> None:
            content = {**about, "missing": missing, "steps": [asdict(result) for result in results]}
            (out / f"part{part}.json").write_text(json.dumps(content, indent=1) + "\n")

        write_results()
        if missing:
            say(f"part {part}: skipped (needs {', '.join(missing)})")
        for step in make_steps(out, args.device, args.quick) if not missing else []:
            chosen = step.part == part and (not args.step or step.name in args.step)
            if step.part and not chosen:
                continue
            figures = out / f"{step.name}.json"
            figures.unlink(missing_ok=True)  # of an earlier run
            results.append(result := run_step(step, out, end, args.minutes / PART_MINUTES))
            say(
                f"part {part}, {step.name}: {result.state} in {result.seconds:.0f} s "
                f"({result.reason})"
            )
            if not figures.is_file():
                figures.write_text(json.dumps(asdict(result), indent=1) + "\n")
            write_results()
    return all(result.state != "failed" for result in results)


def sees_no_gpu() -> bool:
    """Return whether torch is installed and sees no CUDA device."""
    found = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return importlib.util.find_spec("torch") is not None and bool(
        subprocess.call([PYTHON, "-c", found])
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for logs and figures")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--part", type=int, choices=(1, 2, 3), action="append", help="part to run; default: all"
    )
    choice.add_argument("--step", action="append", help="step to run; default: all")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu"),
        default="auto",
        help="auto is CUDA; cpu implies --quick",
    )
    parser.add_argument(
        "--quick", action="store_true", help="smallest sizes: shows that the suite works, no result"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=PART_MINUTES,
        help="longest time of each part; the limits of its steps follow",
    )
    args = parser.parse_args()
    args.quick |= args.device == "cpu"
    if args.device == "auto" and sees_no_gpu():
        parser.error(
            "torch sees no CUDA device; for the smallest sizes on the CPU, add --device cpu"
        )
    out = args.out.resolve()
    parts = args.part or [1, 2, 3]
    if args.step:
        part_of = {step.name: step.part for step in make_steps(out, args.device, args.quick)}
        for name in args.step:
            if not part_of.get(name):
                known = ", ".join(name for name, part in part_of.items() if part)
                parser.error(f"--step {name}: no such step; choose from {known}")
        parts = sorted({part_of[name] for name in args.step})
    out.mkdir(parents=True, exist_ok=True)
    passed = [run_part(part, out, args) for part in parts]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
