"""Peak memory and time of a step with each speed and memory option, each in a new process.

On CUDA the peak is PyTorch's allocated memory. On a CPU it is the resident memory of the process;
the part before the first step (libraries, weights, data) is shown separately. Texts are random
words of the encoder's vocabulary with lengths between half the limit and the limit, equal in every
row.

    python benchmarks/memory_switches.py [--model DIR] [--length 128] [--steps 2] [--json OUT]
    [--quick]
"""

import json
import statistics
import time

from common import make_parser, model_folder, publish, table
from fresh import add_worker, in_fresh_process

PAIRS = 16
ROWS: dict[str, dict[str, object]] = {
    "plain (B = 8, fp32)": {},
    "B = 4": {"batch.micro_batch_size": 4},
    "B = 16": {"batch.micro_batch_size": 16},
    "gradient checkpointing": {"model.gradient_checkpointing": True},
    "bf16": {"run.precision": "bf16"},
    "unpadded": {"model.unpad": True},
    "unpadded, bf16": {"model.unpad": True, "run.precision": "bf16"},
    "8-bit AdamW": {"optim.name": "adamw_8bit"},
    "TF32": {"run.tf32": True},
}


def make_batches(encoder, length: int, micro: int) -> list:
    """Return one step of PAIRS pairs; its texts do not depend on the micro-batch size."""
    import torch

    from contaccum.batch import MicroBatch, RowIds, Tokens

    generator = torch.Generator().manual_seed(0)
    vocabulary = encoder.query_tower.backbone.config.vocab_size

    def texts(limit: int) -> tuple:
        ids = torch.randint(5, vocabulary, (PAIRS, limit), generator=generator)
        lengths = torch.randint(limit // 2, limit + 1, (PAIRS, 1), generator=generator)
        return ids, (torch.arange(limit) < lengths).long()

    queries, passages = texts(32), texts(length)
    batches = []
    for start in range(0, PAIRS, micro):
        rows = slice(start, start + micro)
        own = torch.arange(start, start + micro).unsqueeze(1)
        tokens = [
            Tokens(ids[rows], mask[rows, : int(mask[rows].sum(1).max())])
            for ids, mask in (queries, passages)
        ]
        tokens = [
            Tokens(part.input_ids[:, : part.attention_mask.shape[1]], part.attention_mask)
            for part in tokens
        ]
        batches.append(
            MicroBatch(*tokens, RowIds(own, own), [str(i) for i in range(start, start + micro)])
        )
    return batches


def run_row(
    model: str, device: str, length: int, steps: int, changes: dict[str, object]
) -> dict[str, object]:
    """Measure one row in this process."""

    from contaccum.config import TrainConfig, validate
    from contaccum.encoder import DualEncoder
    from contaccum.runtime.engine import Engine

    config = TrainConfig(method="cont_accum", output_dir="-")
    config.data.train, config.batch.global_batch_size, config.bank.size = "-", PAIRS, 256
    # the plain row: nothing is chosen by the device
    config.batch.micro_batch_size, config.model.unpad, config.run.precision = 8, False, "fp32"
    for name, value in changes.items():
        group, field = name.split(".")
        setattr(getattr(config, group), field, value)
    validate(config)
    engine = Engine(device=device, precision=config.run.precision, tf32=config.run.tf32)
    try:
        if config.run.tf32 and engine.device.type != "cuda":
            raise ValueError("needs CUDA")
        encoder = DualEncoder.load(
            model, tie_towers=False, max_query_length=32, max_passage_length=length
        )
        return take_steps(config, engine, encoder.to(engine.device).train(), steps)
    finally:
        engine.close()


def take_steps(config, engine, encoder, steps: int) -> dict[str, object]:
    """Train for some steps; return memory and time of one."""
    import torch

    from contaccum.methods import METHODS
    from contaccum.training import parts
    from contaccum.training.parts import make_optimizer

    parts.apply_switches(encoder, config)
    engine.prepare(encoder, make_optimizer(encoder, config.optim))
    loss = parts.build_loss(config, encoder)
    bank = parts.build_bank(config, engine, encoder, loss)
    batches = make_batches(
        encoder, encoder.settings.max_passage_length, config.batch.micro_batch_size
    )
    start, seconds = engine.peak_memory(), []
    for step in range(steps + 1):  # the first one warms up: kernels, optimizer state
        engine.step, began = step, time.perf_counter()
        METHODS[config.method](engine, batches, bank, loss)
        engine.update()
        bank.end_step()
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {
        "start_mib": start / 2**20,
        "peak_mib": engine.peak_memory() / 2**20,
        "step_s": statistics.median(seconds[1:]),
    }


def main() -> None:
    parser = make_parser(__doc__)
    add_worker(parser)
    parser.add_argument("--length", type=int, default=128, help="longest passage, in tokens")
    parser.add_argument("--steps", type=int, default=2, help="steps timed, after one that warms up")
    options = parser.parse_args()
    if options.worker:
        request = json.loads(options.worker)
        changes = ROWS[request.pop("switch")]
        try:
            found = run_row(**request, changes=changes)
        except ValueError as error:  # InputError is one
            found = {"left_out": str(error)}
        print(json.dumps(found))
        return
    if options.quick:
        options.length, options.steps = 16, 1
    request = {"model": model_folder(options.model), "device": options.device}
    request |= {"length": options.length, "steps": options.steps}
    names = list(ROWS)[:2] if options.quick else ROWS
    rows = [{"switch": name, **in_fresh_process({**request, "switch": name})} for name in names]
    measured = [row for row in rows if "left_out" not in row]
    plain = measured[0]
    lines = [
        [
            row["switch"],
            f"{row['peak_mib']:.0f}",
            f"{row['peak_mib'] - row['start_mib']:.0f}",
            f"{row['step_s']:.3f}",
            f"{row['step_s'] / plain['step_s']:.2f}",
        ]
        for row in measured
    ]
    about = (
        f"{PAIRS} pairs a step, passages of {options.length // 2} to {options.length} tokens, "
        f"`cont_accum` with a bank of 256 rows; median of {options.steps} steps."
    )
    heads = [
        "switch",
        "peak, MiB",
        "beyond what stood before the first step, MiB",
        "s/step",
        "÷ plain",
    ]
    left_out = [f"- {row['switch']}: {row['left_out']}" for row in rows if "left_out" in row]
    parts = [
        about,
        table(heads, lines),
        *(["Left out here:", "\n".join(left_out)] if left_out else []),
    ]
    publish(options, "What each switch gives", parts, {"rows": rows, "pairs": PAIRS})


if __name__ == "__main__":
    main()
