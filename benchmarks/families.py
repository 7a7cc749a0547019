"""Peak memory of a training step by family of encoder, with all weights and with LoRA.

Encoders have random weights in the published size of a model of each family and serve both towers.
The method is `cont_accum` with 8 pairs per step in micro-batches of 4, with random tokens. Each
figure comes from a new process: on CUDA PyTorch's allocated memory, on a CPU the resident memory of
the process, libraries included.

    python benchmarks/families.py [--json OUT] [--quick] [--length 128] [--names NAME...]
"""

import json
import tempfile
from pathlib import Path

import torch
from common import make_parser, publish, table
from fresh import add_worker, in_fresh_process
from step_memory import MICRO, PAIRS, QUERY, measure
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from contaccum.encoder import DualEncoder, wordpiece_tokenizer

RANK = 16
BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
FAMILIES = {
    "all-MiniLM-L6-v2": ("bert", {
        "vocab_size": 30_522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536,
    }),
    "bert-base-uncased": ("bert", BASE | {"vocab_size": 30_522}),
    "roberta-base": ("roberta", BASE | {"vocab_size": 50_265, "max_position_embeddings": 514, "type_vocab_size": 1}),
    "distilbert-base-uncased": ("distilbert", {"vocab_size": 30_522}),
    "xlm-roberta-base": ("xlm-roberta", BASE | {"vocab_size": 250_002, "max_position_embeddings": 514, "type_vocab_size": 1}),
    "ModernBERT-base": ("modernbert", {"vocab_size": 50_368}),
    "mpnet-base": ("mpnet", BASE | {"vocab_size": 30_527, "max_position_embeddings": 514}),
    "electra-base-discriminator": ("electra", BASE | {"vocab_size": 30_522, "embedding_size": 768}),
    "Qwen3-0.6B": ("qwen3", {
        "vocab_size": 151_936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    }),
}  # fmt: skip
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
ROWS = {"all weights": {}, "LoRA": {"lora.rank": RANK}}


def write_model(folder: str, family: str, sizes: dict[str, int]) -> None:
    """Write an encoder folder with random weights and a tokenizer of a few words."""
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(family, pad_token_id=0, **sizes)).save_pretrained(
        folder
    )
    words = wordpiece_tokenizer(["the red fox and the blue whale"] * 3, 100).backend_tokenizer
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", eos_token="[SEP]", pad_token="[PAD]"
    ).save_pretrained(folder)


def measure_family(name: str, args, sizes: dict[str, int]) -> dict[str, object]:
    """Return size, default pooling and peaks of one family."""
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / name)
        write_model(place, FAMILIES[name][0], sizes)
        encoder = DualEncoder.load(place, tie_towers=True, max_passage_length=64)
        row = {
            "name": name, "family": FAMILIES[name][0], "pooling": encoder.settings.pooling,
            "parameters": sum(p.numel() for p in encoder.parameters()), "dim": encoder.dim,
        }  # fmt: skip
        del encoder
        request = {
            "model": place,
            "device": args.device,
            "length": args.length,
            "steps": 1,
            "method": "cont_accum",
        }
        for kind, changes in ROWS.items():
            found = in_fresh_process({**request, "changes": {"model.tie_towers": True, **changes}})
            row[kind] = {key: found[key] for key in ("trained", "peak_mib")}
    return row


def main() -> None:
    parser = make_parser(__doc__, model=False)
    parser.add_argument("--length", type=int, default=128, help="tokens of a passage")
    parser.add_argument(
        "--names", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="NAME"
    )
    add_worker(parser)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(json.loads(args.worker))))
        return
    if args.quick:
        args.names, args.length = args.names[1:2], 16
    rows = [
        measure_family(
            name, args, {**FAMILIES[name][1], **(SMALL | {"vocab_size": 200} if args.quick else {})}
        )
        for name in args.names
    ]
    cells = [
        [row["name"], row["family"], row["pooling"], row["dim"], row["parameters"]]
        + [number for kind in ROWS for number in (row[kind]["trained"], row[kind]["peak_mib"])]
        for row in rows
    ]
    about = (
        f"Tied towers of random weights, cont_accum, fp32, AdamW, {PAIRS} pairs a step, {MICRO} at "
        f"a time, {QUERY} and {args.length} tokens; LoRA of rank {RANK} on every linear layer. "
        "Pooling is what a plain folder of the family gets."
    )
    heads = ["sizes of", "family", "pooling", "d", "numbers"]
    heads += [f"{kind}: {what}" for kind in ROWS for what in ("trained", "peak, MiB")]
    publish(args, "Memory by family of encoder", [about, table(heads, cells)], {"rows": rows})


if __name__ == "__main__":
    main()
