"""The gradients of a config's method on its first steps, in one process or under torchrun; started by ``contaccum verify``.

usage: python -m contaccum.study.gradients CONFIG.json, whose output_dir is the file to write
"""

import sys

from safetensors.torch import save_file

from contaccum.config import from_mapping
from contaccum.engine import Engine
from contaccum.files import read_json
from contaccum.study.verify import Bench


def main(file: str) -> None:
    config = from_mapping(read_json(file))
    engine = Engine(device=config.run.device, precision=config.run.precision, seed=config.seed)
    bench = Bench(config, engine)
    found = bench.gradients(config.method, bench.bank(config.method, config.bank_rows))
    if engine.is_main:
        named = [(f"{step}/{name}", gradient) for step, one in enumerate(found) for name, gradient in one.items()]
        save_file({name: gradient.cpu().contiguous() for name, gradient in named}, config.output_dir)
    engine.barrier()
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1])
