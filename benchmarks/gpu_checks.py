"""Checks of training on the device at hand: precisions, out-of-memory recovery, resume,
synchronisations and kernels.

    python benchmarks/gpu_checks.py --check precision|shrink|resume|stalls --model DIR --data
    BEIR_DIR [--json OUT] [--quick]

benchmarks/made.py writes DIR and BEIR_DIR. ``precision``, ``shrink`` and ``resume`` call the
command line and exit with code 1 if the result is wrong. ``stalls`` counts, in training steps after
a warm-up, the operations that make the host wait for the GPU (torch.cuda.set_sync_debug_mode) and
the kernels (torch.profiler; on a CPU the operators), for each method.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import make_parser, publish, table
from invented_set import write_invented_set
from safetensors.torch import load_file

from contaccum.cli import main as command_line
from contaccum.config import METHOD_SPECS, TrainConfig, from_mapping
from contaccum.runtime.processes import encoding_device
from contaccum.training.log import read_log
from contaccum.training.loop import Training, train

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = 77  # exit code of a check that says why it does not run here
NEAR = 0.05
"""Largest difference of ndcg@10 between fp32 and half precision."""
SAME_LOSS = 1e-2
"""Largest relative difference between losses of a step in whole and in smaller micro-batches."""
SMALLEST = {"model.tiny_width": 32, "model.tiny_vocabulary": 300}
"""Encoder of ``--quick``. Most of the time of a larger vocabulary is spent on learning it."""
WARM_UP, COUNTED = 5, 2
"""Steps before and while synchronisations are counted; the next step is profiled."""
Findings = tuple[list[str], list[list[Any]], dict[str, Any]]
"""Column heads, rows, figures."""


def options(settings: dict[str, object]) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def invented(folder: Path, settings: dict[str, object]) -> list[str]:
    """Return the call that trains ``cont_accum`` on the set of invented words, with its config and
    other settings."""
    data = write_invented_set(folder.parent / "invented")
    config = ["--config", str(ROOT / "configs" / "study" / "demo.yaml")]
    changes = {"data.train": data, "method": "cont_accum", "optim.epochs": 5} | settings
    return ["train", *config, "--output_dir", str(folder), *options(changes)]


def contaccum(*call: str, success: bool = True) -> int:
    """Run a command in this process, which saves importing the packages again.

    Return its exit code, or exit if it must be 0.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = command_line(list(call))
    if code and success:
        sys.exit(f"contaccum {' '.join(call)}: exit code {code}\n{said.getvalue()[-3000:]}")
    return code


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_log(folder) if "loss" in line]


def check_precision(args: Any, scratch: Path) -> Findings:
    """Train on the set of invented words in fp32, bf16 and fp16; ndcg@10 must agree."""
    rows, found = [], {}
    for precision in ("fp32", "bf16", "fp16"):
        folder = scratch / precision
        short = {"optim.max_steps": 4, **SMALLEST} if args.quick else {}
        settings = {
            "run.device": args.device,
            "run.precision": precision,
            "run.save_steps": 0,
            **short,
        }
        on_cpu = encoding_device(args.device).type == "cpu"
        if contaccum(*invented(folder, settings), success=precision != "fp16" or not on_cpu):
            rows.append([precision, "not available on a CPU", "", ""])
            continue
        metrics = folder / "metrics.json"
        given = [
            "--model", str(folder / "model"), "--data", str(scratch / "invented"),
            "--output", str(metrics), "--device", args.device,
        ]  # fmt: skip
        contaccum("evaluate", *given)
        score = json.loads(metrics.read_text())["mean"]["ndcg@10"]
        seconds = sum(line["seconds"] for line in read_log(folder) if "loss" in line)
        found[precision] = {"ndcg@10": score, "loss": losses(folder)[-1], "seconds": seconds}
        rows.append([precision, f"{score:.4f}", f"{losses(folder)[-1]:.6f}", f"{seconds:.1f}"])
    apart = {name: abs(each["ndcg@10"] - found["fp32"]["ndcg@10"]) for name, each in found.items()}
    if max(apart.values()) > NEAR and not args.quick:
        sys.exit(f"ndcg@10 differs by more than {NEAR} from fp32: {json.dumps(found)}")
    return ["precision", "ndcg@10", "last loss", "training, s"], rows, found


def check_shrink(args: Any, scratch: Path) -> Findings:
    """Train with enough memory and with too little for the micro-batch size; losses must agree."""
    if encoding_device(args.device).type != "cuda":
        print("needs CUDA, for run.memory_budget")
        sys.exit(SKIPPED)
    settings = {
        "method": "grad_cache", "data.train": args.data, "model.name": args.model,
        "model.dropout": 0, "model.tie_towers": True, "model.max_query_length": 64,
        "model.max_passage_length": 256, "batch.global_batch_size": 64,
        "batch.micro_batch_size": 64, "optim.max_steps": 3, "run.device": args.device,
        "run.save_steps": 0,
    }  # fmt: skip
    free, limited = scratch / "free", scratch / "limited"
    contaccum("train", *options(settings | {"output_dir": free}))
    peak = max(line["peak_memory"] for line in read_log(free))
    budget = int(0.6 * peak)
    own = {"output_dir": limited, "run.memory_budget": f"{budget // 10**6}MB"}
    call = [sys.executable, "-m", "contaccum", "train", *options(settings | own)]
    torch.cuda.empty_cache()
    done = subprocess.run(call, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        sys.exit(f"{' '.join(call)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    sizes = [read_log(folder)[-1]["micro_batches"] for folder in (free, limited)]
    apart = max(abs(a / b - 1) for a, b in zip(losses(limited), losses(free), strict=True))
    found = {
        "peak": peak,
        "budget": budget,
        "micro_batches": sizes,
        "losses_apart": apart,
    }
    if (
        "out of memory with micro-batches of 64 pairs; retrying" not in done.stderr
        or sizes[1] <= sizes[0]
    ):
        sys.exit(f"the micro-batches did not shrink: {json.dumps(found)}\n{done.stderr[-2000:]}")
    if apart > SAME_LOSS:
        sys.exit(f"the losses differ by {apart:.2e}: {json.dumps(found)}")
    rows = [[name, size, f"{losses(folder)[-1]:.6f}"] for name, size, folder in
            zip(("enough memory", "too little"), sizes, (free, limited), strict=True)]  # fmt: skip
    return ["run", "micro-batches of a step", "last loss"], rows, found


def check_resume(args: Any, scratch: Path) -> Findings:
    """Stop a run by SIGTERM, resume it, and compare its weights with those of an uninterrupted
    run."""
    steps, saved, stop = (8, 2, 3) if args.quick else (20, 5, 7)
    settings = {
        "run.device": args.device,
        "run.save_steps": saved,
        "optim.max_steps": steps,
        "bank.warmup_steps": 2,
    }
    settings |= SMALLEST if args.quick else {}
    whole, broken = scratch / "whole", scratch / "broken"
    contaccum(*invented(whole, settings))
    with open(scratch / "stderr", "w") as stderr:
        call = [sys.executable, "-m", "contaccum", *invented(broken, settings)]
        process = subprocess.Popen(call, stderr=stderr, stdout=stderr)
        while process.poll() is None and len(losses(broken)) < stop:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    stopped = len(losses(broken))
    if code != 143:
        sys.exit(
            f"the stopped run ended with exit code {code}, expected "
            f"143\n{(scratch / 'stderr').read_text()[-2000:]}"
        )
    contaccum(*invented(broken, settings), "--resume")
    weights = [
        {
            str(file.relative_to(folder)): load_file(file)
            for file in sorted(folder.rglob("model/*/model.safetensors"))
            if "checkpoints" not in file.parts
        }
        for folder in (whole, broken)
    ]
    apart = max(
        float((weights[0][file][name] - tensor).abs().max())
        for file, tensors in weights[1].items()
        for name, tensor in tensors.items()
    )
    found = {"stopped_after": stopped, "exit_code": code, "weights_apart": apart}
    if apart > (0 if encoding_device(args.device).type == "cpu" else 1e-3):
        sys.exit(f"the resumed run's weights differ: {json.dumps(found)}")
    rows = [[stopped, len(losses(broken)), f"{apart:.1e}"]]
    return ["stopped after step", "steps", "largest difference of a weight"], rows, found


def check_stalls(args: Any, scratch: Path) -> Findings:
    """Count synchronisations and kernels of a training step of each method."""
    rows, found = [], {}
    for method in METHOD_SPECS:
        found[method] = one = count_step(method, args, scratch / method)
        waits = (
            "not counted on a CPU"
            if one["synchronisations"] is None
            else f"{one['synchronisations']:g}"
        )
        places = ", ".join(f"{place}: {count:g}" for place, count in one["places"].items())
        rows.append(
            [
                f"`{method}`",
                one["micro_batches"],
                waits,
                places,
                one["kernels"],
                f"{one['busy']:.2f}",
            ]
        )
    heads = [
        "method",
        "micro-batches",
        "synchronisations",
        "where",
        "kernels (CPU: operators)",
        "share of time in kernels",
    ]
    return heads, rows, found


@contextmanager
def counted_waits(waits: Counter[str], cuda: bool) -> Iterator[None]:
    """Count the lines of code that wait for the GPU inside the ``with`` block: file and line ->
    number of waits."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
    own = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
    waits.update(f"{Path(each.filename).name}:{each.lineno}" for each in own)


def count_step(method: str, args: Any, folder: Path) -> dict[str, Any]:
    """Train a few steps in this process and return the counts of one step."""
    pairs = 8 if method == "in_batch" or args.quick else 64
    batch = {"global_batch_size": pairs, "micro_batch_size": 4 if args.quick else 8}
    config = from_mapping(TrainConfig, {
        "method": method, "output_dir": str(folder),
        "model": {"name": args.model, "max_passage_length": 128}, "data": {"train": args.data},
        "batch": batch, "bank": {"size": 64 if args.quick else 1024},
        "optim": {"max_steps": WARM_UP + COUNTED + 1},
        "run": {"device": args.device, "precision": args.precision, "save_steps": 0},
    })  # fmt: skip
    cuda = encoding_device(args.device).type == "cuda"
    waits: Counter[str] = Counter()
    found: dict[str, Any] = {}
    original = Training.take_step

    def counted(training: Training, micro_batches: list) -> Any:
        found["micro_batches"] = len(micro_batches)
        if training.done < WARM_UP:
            return original(training, micro_batches)
        if training.done < WARM_UP + COUNTED:
            with counted_waits(waits, cuda):
                return original(training, micro_batches)
        kinds = [
            torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
        ]
        start = time.perf_counter()
        with torch.profiler.profile(activities=kinds) as profiler:
            values = original(training, micro_batches)
            if cuda:
                torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
        events = [event for event in profiler.events() if event.device_type == kind]
        busy = (
            sum(
                event.self_device_time_total if cuda else event.self_cpu_time_total
                for event in events
            )
            / 1e6
        )
        found.update(kernels=len(events), busy=busy / seconds, seconds=seconds)
        return values

    Training.take_step = counted  # type: ignore[method-assign]
    try:
        train(config)
    finally:
        Training.take_step = original  # type: ignore[method-assign]
    found["synchronisations"] = sum(waits.values()) / COUNTED if cuda else None
    found["places"] = {place: count / COUNTED for place, count in waits.most_common(8)}
    return found


CHECKS = {
    "precision": check_precision,
    "shrink": check_shrink,
    "resume": check_resume,
    "stalls": check_stalls,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--check", choices=list(CHECKS), required=True)
    parser.add_argument("--data", required=True, help="BEIR folder with a train split")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with tempfile.TemporaryDirectory() as scratch:
        heads, rows, found = CHECKS[args.check](args, Path(scratch))
    publish(
        args,
        f"Check: {args.check}",
        [(CHECKS[args.check].__doc__ or "").strip(), table(heads, rows)],
        found,
    )


if __name__ == "__main__":
    main()
