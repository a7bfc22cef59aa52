"""Products of few rows with the weights of the embedded model's layers, in every form that `engine.models.linear` has.

    python -m benchmarks.cpu_products [--write]

Microseconds of wall time a product: of 25 passes over 40 different weights, more than a cache holds, the fifth best.
`gguf`: 4 bits with scale and offset, as the file has them.  `half`: 16 bits.  `packed`: float32.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from benchmarks.cpu_engine import processor_name
from engine.models.linear import HalfLinear, Linear, PackedLinear
from kernels.quantized_rows import BLOCK, QuantizedProduct, QuantizedWeight

RESULTS = Path(__file__).parent / "results"
SHAPES = [(3072, 576), (576, 1536)]  # gate and up; down
ROWS = [1, 2, 3, 4, 6, 8, 10]
WEIGHTS, PASSES = 40, 25


def forms(rows: int, columns: int) -> dict[str, list[Linear]]:
    """Every form, many times."""
    shape = rows, columns // BLOCK
    blocks = QuantizedWeight(
        torch.randint(0, 256, (*shape, 16), dtype=torch.uint8), torch.rand(shape).half(), torch.rand(shape).half()
    )
    weight = torch.randn(rows, columns)
    return {
        "gguf": [QuantizedProduct(blocks) for _ in range(WEIGHTS)],
        "half": [HalfLinear(weight, None) for _ in range(WEIGHTS)],
        "packed": [PackedLinear(weight, None) for _ in range(WEIGHTS)],
    }


def microseconds(linears: list[Linear], x: torch.Tensor) -> float:
    taken = []
    for _ in range(PASSES):
        begun = time.perf_counter()
        for linear in linears:
            linear(x)
        taken.append((time.perf_counter() - begun) / len(linears) * 1e6)
    return sorted(taken)[4]


def measure() -> list[list[str]]:
    """A row a shape and form, a column a number of rows."""
    table = []
    for rows, columns in SHAPES:
        for name, linears in forms(rows, columns).items():
            figures = [microseconds(linears, torch.randn(count, columns)) for count in ROWS]
            table.append([f"{rows} x {columns}, {name}", *(f"{figure:.0f}" for figure in figures)])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write cpu_products.json, which docs/build.py shows")
    args = parser.parse_args()
    columns = ["weight", *(f"{count} rows" for count in ROWS)]
    rows = measure()
    if args.write:
        capability = torch.backends.cpu.get_cpu_capability()
        result = {
            "section": "cpu-engine",
            "title": "Products of few rows",
            "command": "python -m benchmarks.cpu_products --write",
            "machine": f"{processor_name()} ({capability}), {torch.get_num_threads()} threads",
            "date": time.strftime("%Y-%m-%d"),
            "tables": [{"title": "microseconds a product", "columns": columns, "rows": rows}],
        }
        (RESULTS / "cpu_products.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in [columns, *rows]:
        print(f"{row[0]:24}" + "".join(f"{cell:>9}" for cell in row[1:]))


if __name__ == "__main__":
    main()
