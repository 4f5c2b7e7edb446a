"""Train an EAGLE head for a benchmark's target, or go on with it. It is kept in Bozza's cache folder, outside of git.

usage: python benchmarks/head.py --model NAME [--tokens N] [--epochs N]

The same as `bozza train eagle` with settings that a 1.5B model can be trained with in an evening on two cores: the
head's feed-forward part is as wide as the target's, and there are fewer tokens. Started again, it goes on where it
stopped. Prints the folder; use it with --draft eagle:FOLDER, or --head FOLDER of benchmarks/peers/run.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bozza.cli.train import Bars
from bozza.models.catalog import cache_folder
from bozza.threads import use_threads
from bozza.train.loop import Recipe
from bozza.train.pipeline import Order, train_eagle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    use_threads(None)
    out = cache_folder() / "heads" / Path(options.model).name
    out.mkdir(parents=True, exist_ok=True)
    with Bars() as bars:
        train_eagle(Order(options.model, out, options.tokens, widen=1, recipe=Recipe(epochs=options.epochs)), bars)
    print(out)


if __name__ == "__main__":
    main()
