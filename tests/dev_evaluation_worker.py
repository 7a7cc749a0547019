"""Job of test_processes.py: a dev evaluation; saves each process's metrics, best score and number
of encoded passages.

arguments: DATA OUTPUT
"""

from pathlib import Path

from helpers import train_config

from contaccum.config import validate
from contaccum.encoder import DualEncoder, tokenizer
from contaccum.runtime.engine import Engine
from contaccum.runtime.files import write_json
from contaccum.runtime.launch import StopSignals
from contaccum.training.loop import Training


def main(arguments: list[str]) -> None:
    data, output = arguments
    tokenizer.WINDOW = 8  # a small corpus has several windows
    engine = Engine(device="cpu")
    changes = {
        "data.dev": data,
        "batch.micro_batch_size": 4 // engine.world,
        "run.metric": "ndcg@10",
    }
    config = train_config(Path(data), Path(output), **changes)
    validate(config, engine.world)
    training = Training(config, engine, StopSignals())
    metrics, encoded = {}, []
    encode_passages = DualEncoder.encode_passages

    def counted(self, texts, *given, **named):
        encoded.append(len(texts))
        return encode_passages(self, texts, *given, **named)

    DualEncoder.encode_passages = counted
    training.log.evaluation = lambda _, scores, name, seconds: metrics.update(scores)
    training.evaluate()
    write_json(
        f"{output}.{engine.rank}.json",
        {"mean": metrics, "best": training.dev.best, "encoded": sum(encoded)},
    )
