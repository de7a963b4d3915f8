"""The machine's own limit: the model's matrix products alone, in float32.

Random weights of the model's shapes, each layer its own, so that memory is read as by
a real model. The rest (attention, norms, sampling, HTTP) is left out.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch


class Products:
    """All linear layers of a decoder, and the one that makes logits."""

    def __init__(self, folder: Path) -> None:
        """Weights as ``config.json`` says."""
        config = json.loads((folder / "config.json").read_text())
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        head = config.get("head_dim") or hidden // config["num_attention_heads"]
        q = head * config["num_attention_heads"]
        kv = head * config["num_key_value_heads"]
        shapes = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]
        shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
        layers = config["num_hidden_layers"]
        self.layers = [[torch.randn(s) for s in shapes] for _ in range(layers)]
        self.logits = torch.randn(config["vocab_size"], hidden)

    @torch.inference_mode()
    def step_ms(self, tokens: int, drawn: int) -> float:
        """A step over ``tokens``, logits for ``drawn`` of them."""
        inputs = {w.shape[1]: torch.randn(tokens, w.shape[1]) for w in self.layers[0]}
        last = torch.randn(drawn, self.logits.shape[1])
        started_s = time.perf_counter()
        for layer in self.layers:
            for weight in layer:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        torch.nn.functional.linear(last, self.logits)
        return 1000 * (time.perf_counter() - started_s)


def measure(folder: Path, *, tokens: int, drawn: int, times: int) -> float:
    """Median over ``times`` steps after one that is not counted, in ms."""
    products = Products(folder)
    products.step_ms(tokens, drawn)
    return statistics.median(products.step_ms(tokens, drawn) for _ in range(times))


def main() -> None:
    """Print one figure as JSON: a process of its own, so that nothing stays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--drawn", type=int, required=True)
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    found = measure(
        given.folder, tokens=given.tokens, drawn=given.drawn, times=given.times
    )
    print(json.dumps({"ms": found, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
