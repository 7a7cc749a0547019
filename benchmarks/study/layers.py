"""Keep only an encoder's lowest layers: python benchmarks/study/layers.py MODEL OUT [--layers 3]"""

import argparse

from transformers import AutoModel, AutoTokenizer

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--layers", type=int, default=3)
    chosen = parser.parse_args()
    AutoModel.from_pretrained(chosen.model, num_hidden_layers=chosen.layers).save_pretrained(
        chosen.out
    )
    AutoTokenizer.from_pretrained(chosen.model).save_pretrained(chosen.out)
