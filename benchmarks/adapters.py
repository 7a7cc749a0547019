"""Memory and time of a training step with LoRA and QLoRA compared with all weights, for a
decoder-only encoder.

The encoder has random weights (Qwen3's architecture; default 12 layers, width 768) and serves both
towers; a step has 8 pairs in micro-batches of 4, with random tokens. Each row runs in a new
process. On CUDA the peak is PyTorch's allocated memory, on a CPU the resident memory of the
process, libraries included.

usage: python benchmarks/adapters.py [--json OUT] [--quick] [--layers 12] [--width 768] [--length
64] [--steps 2]
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import make_parser, publish, table
from fresh import add_worker, in_fresh_process
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from contaccum.batch import MicroBatch, RowIds, Tokens
from contaccum.config import TrainConfig, validate
from contaccum.encoder import DualEncoder, wordpiece_tokenizer
from contaccum.methods import METHODS
from contaccum.runtime.engine import Engine
from contaccum.training import parts
from contaccum.training.parts import make_optimizer, trained_parameters

PAIRS, MICRO, QUERY, RANK = 8, 4, 16, 16
RECOMPUTED = {"model.gradient_checkpointing": True}
LORA = {"lora.rank": RANK}
ROWS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, recomputed": RECOMPUTED,
    "LoRA": LORA,
    "LoRA, recomputed": LORA | RECOMPUTED,
    "LoRA, base in 4 bits (QLoRA)": LORA | {"model.quantize": "4bit"},
    "QLoRA, recomputed": LORA | {"model.quantize": "4bit"} | RECOMPUTED,
}


def write_model(folder: Path, layers: int, width: int, vocabulary: int) -> None:
    """Write an encoder folder with random weights."""
    words = wordpiece_tokenizer(["the red fox and the blue whale"] * 3, 100)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words.backend_tokenizer, eos_token="[SEP]", pad_token="[PAD]"
    )
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, head_dim=64,
        intermediate_size=3 * width, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3Model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_batches(vocabulary: int, length: int) -> list[MicroBatch]:
    """Return one step of random tokens without padding."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for start in range(0, PAIRS, MICRO):
        texts = [
            torch.randint(5, vocabulary, (MICRO, size), generator=generator)
            for size in (QUERY, length)
        ]
        own = torch.arange(start, start + MICRO).unsqueeze(1)
        tokens = [Tokens(ids, torch.ones_like(ids)) for ids in texts]
        batches.append(MicroBatch(*tokens, RowIds(own, own), [str(i) for i in range(MICRO)]))
    return batches


def measure(request: dict[str, Any]) -> dict[str, float]:
    """Measure one row in this process: ``steps`` steps after one that makes the optimizer's state.

    request: model, the encoder's folder; device; length, tokens of a passage; steps; method;
    changes, settings by name.
    """
    config = make_config(request)
    engine = Engine(device=config.run.device)
    encoder: DualEncoder = parts.build_encoder(config, None, engine.device)
    parts.apply_switches(encoder.train(), config)
    engine.prepare(encoder, make_optimizer(encoder, config.optim))
    seconds = take_steps(config, engine, encoder, 1 + request["steps"])
    with tempfile.TemporaryDirectory() as folder:
        encoder.save(Path(folder) / "model")
        saved = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
    return {
        "trained": sum(p.numel() for p in trained_parameters(encoder).values()),
        "peak_mib": engine.peak_memory() / 2**20,
        "step_s": statistics.median(seconds[1:]),
        "saved_mib": saved / 2**20,
    }


def make_config(request: dict[str, Any]) -> TrainConfig:
    config = TrainConfig(method=request["method"], output_dir="-")
    config.data.train = "-"
    config.batch.global_batch_size, config.batch.micro_batch_size = PAIRS, MICRO
    config.model.name, config.run.device = request["model"], request["device"]
    config.model.tie_towers, config.model.unpad, config.run.precision = False, False, "fp32"
    config.model.max_query_length, config.model.max_passage_length = QUERY, request["length"]
    for name, value in request["changes"].items():
        group, field = name.split(".")
        setattr(getattr(config, group), field, value)
    validate(config)
    return config


def take_steps(
    config: TrainConfig, engine: Engine, encoder: DualEncoder, steps: int
) -> list[float]:
    """Return the seconds of each step."""
    loss = parts.build_loss(config, encoder)
    bank = parts.build_bank(config, engine, encoder, loss)
    batches = make_batches(
        encoder.query_tower.backbone.config.vocab_size, config.model.max_passage_length or 0
    )
    engine.reset_peak_memory()
    seconds = []
    for step in range(steps):
        engine.begin_step(step)
        began = time.perf_counter()
        METHODS[config.method](engine, batches, bank, loss)
        norms = engine.gradient_norms()  # waits for the device
        engine.clip(sum(norms), config.optim.max_grad_norm)
        engine.update()
        bank.end_step()
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = make_parser(__doc__, model=False)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768, help="a multiple of 64")
    parser.add_argument("--length", type=int, default=64, help="tokens of a passage")
    parser.add_argument("--steps", type=int, default=2, help="steps timed, after one that warms up")
    add_worker(parser)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(json.loads(args.worker))))
        return
    layers, width, vocabulary = (1, 64, 200) if args.quick else (args.layers, args.width, 32_000)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), layers, width, vocabulary)
        parameters = sum(
            p.numel() for p in DualEncoder.load(folder, max_passage_length=64).parameters()
        )
        request = {
            "model": folder,
            "device": args.device,
            "length": args.length,
            "steps": args.steps,
            "method": "grad_cache",
        }
        for name, changes in ROWS.items():
            rows.append({"row": name, **in_fresh_process({**request, "changes": changes})})
    cells = [
        [row["row"], *(row[key] for key in ("trained", "peak_mib", "step_s", "saved_mib"))]
        for row in rows
    ]
    about = (
        f"Two towers from one encoder of {parameters:,} parameters; LoRA of rank {RANK} on every "
        f"linear layer; grad_cache, fp32, {PAIRS} pairs a step, {MICRO} at a time, {QUERY} and "
        f"{args.length} tokens; median of {args.steps} steps."
    )
    heads = ("what is trained", "trained numbers", "peak, MiB", "s/step", "saved weights, MiB")
    publish(
        args, "Adapters", [about, table(heads, cells)], {"parameters": parameters, "rows": rows}
    )


if __name__ == "__main__":
    main()
