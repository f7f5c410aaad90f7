"""Times mixes of instructions from a bundle: the part `rates`, on a machine with a GPU.

Prints one line of JSON for each.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from bnncc.bundle.device.place import Place, median
from bnncc.tuning.draws import Draws

HERE = Path(__file__).parent
REPEATS = 15


def main() -> None:
    index = json.loads((HERE / "index.json").read_text())
    place = Place(index["device"], HERE)
    module = place.library(HERE / "rates.so")
    for entry in index["rates"]:
        seed = place.tensor(Draws(0).integers(0, 2**32, entry["words"], np.uint32))
        out = place.tensor(np.zeros(entry["out"], np.int32))
        function = module[entry["symbol"]]
        function(seed, out)
        place.wait()
        timer = place.timer(lambda f=function, s=seed, o=out: f(s, o), 1)
        us = median([timer.microseconds() for _ in range(REPEATS)])
        tmacs = round(entry["macs"] / us / 1e6, 1)
        print(json.dumps({"mix": entry["name"], "us": us, "tmacs": tmacs}), flush=True)


if __name__ == "__main__":
    main()
