"""Memory and time of a training step with LoRA and QLoRA compared with all weights, for a decoder-only encoder.

The encoder has random weights (Qwen3's architecture; default 12 layers, width 768) and serves both
towers; a step has 8 pairs in micro-batches of 4, with random tokens. Each row runs in a new
process. On CUDA the peak is PyTorch's allocated memory, on a CPU the resident memory of the
process, libraries included.

usage: python benchmarks/adapters.py [--json OUT] [--quick] [--layers 12] [--width 768] [--length
64] [--steps 2]
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import make_parser, publish, table
from fresh import add_worker, in_fresh_process
from step_memory import MICRO, PAIRS, QUERY, measure
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from contaccum.encoder import DualEncoder, wordpiece_tokenizer

RANK = 16
RECOMPUTED = {"model.gradient_checkpointing": True}
LORA = {"lora.rank": RANK}
ROWS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, recomputed": RECOMPUTED,
    "LoRA": LORA,
    "LoRA, recomputed": LORA | RECOMPUTED,
    "LoRA, base in 8 bits": LORA | {"model.quantize": "8bit"},
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
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, head_dim=64, intermediate_size=3 * width, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3Model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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
