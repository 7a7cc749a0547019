"""Job of test_processes.py: a run that each process would end after another step; saves the number
of steps that each process took.

arguments: DATA OUTPUT
"""

from pathlib import Path

from helpers import train_config

from contaccum.runtime.files import write_json
from contaccum.runtime.launch import process_place
from contaccum.training.loop import Training, train


def main(arguments: list[str]) -> None:
    data, output = arguments
    rank, world = process_place()
    steps = []

    def end(training: Training) -> None:
        steps.append(training.total)
        if training.done == 2:
            training.set_total(3 + rank)

    changes = {"batch.micro_batch_size": 4 // world, "optim.max_steps": 6}
    train(train_config(Path(data), Path(output), **changes), after_step=end)
    write_json(f"{output}.{rank}.json", steps)
