"""What HTTP streaming costs: the same load through `LLM.generate` and through a server process, in one run.

    python benchmarks/server_overhead.py [--batch 16] [--input-len 64] [--output-len 64] [--rounds 3] [--write]

Prints tokens per second of both, round by round in turn, and the ratio of their medians.  Ends with status 1 below
--least (0.9 unless given).  Wall time: on a machine that others use at the same time the figures mean nothing.
--write: put the table into benchmarks/results/server_overhead.json, which docs/build.py shows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.bench_serve import Item, Load, run
from engine.config import EngineArgs
from engine.llm import LLM, build_core
from engine.sampling import SamplingParams

RESULTS = Path(__file__).parent / "results" / "server_overhead.json"
SETTINGS = ("OMP_NUM_THREADS", "LAWFUL_CONTRACTS")  # of the environment, and told with the command
Pair = tuple[float, float]  # tokens/s of LLM.generate and of HTTP streaming, in one round


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--least", type=float, default=0.9, help="the least ratio that is good enough")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}, which docs/build.py shows")
    args = parser.parse_args()
    limits = {"max_model_len": 1024, "max_num_seqs": max(16, args.batch)}
    llm = LLM.from_core(build_core(EngineArgs(model=args.model, disable_log_stats=True, **limits)))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    with tempfile.TemporaryDirectory() as home:
        log = Path(home, "log")
        with log.open("w") as out:
            command = [sys.executable, "-m", "engine", "serve", args.model, "--port", "0", *flags]
            server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            while not (found := re.search(r"on (http://\S+)", log.read_text())):
                if server.poll() is not None:
                    raise RuntimeError(log.read_text())
                time.sleep(0.1)
            return compare(args, llm, found[1])
        finally:
            server.terminate()
            server.wait(60)


def compare(args: argparse.Namespace, llm: LLM, url: str) -> int:
    """Both in turn, after a warm-up of each."""
    items = [Item(0.0, args.input_len, args.output_len)] * args.batch
    load = Load(items, llm.core.vocab_size, 0, None, True, None, 600.0, float("inf"))
    prompts = [[(7 * i + j) % 1000 for j in range(args.input_len)] for i in range(args.batch)]
    params = SamplingParams(max_tokens=args.output_len, ignore_eos=True)

    def alone() -> float:
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - begun)

    def served() -> float:
        result = run(load, url, None)
        if result["failed"]:
            raise RuntimeError(f"requests failed: {result['errors']}")
        return float(result["output_throughput"])

    alone(), served()
    pairs = [(alone(), served()) for _ in range(args.rounds)]
    for direct, http in pairs:
        print(f"LLM.generate {direct:8.1f} tokens/s   HTTP streaming {http:8.1f} tokens/s   ratio {http / direct:.3f}")
    direct, http = medians(pairs)
    ratio = http / direct
    if args.write:
        RESULTS.write_text(json.dumps(document(pairs, args), indent=1) + "\n")
    print(json.dumps({"batch": args.batch, "ratio_of_medians": round(ratio, 4), "cores": os.cpu_count()}))
    return 0 if ratio >= args.least else 1


def medians(pairs: Sequence[Pair]) -> Pair:
    """Of each over the rounds."""
    return statistics.median(direct for direct, _ in pairs), statistics.median(http for _, http in pairs)


def document(pairs: Sequence[Pair], args: argparse.Namespace) -> dict[str, Any]:
    """The table as docs/build.py reads it: round by round, then the medians with their ratio."""
    named = [*((str(i), pair) for i, pair in enumerate(pairs, 1)), ("median", medians(pairs))]
    set_to = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return {
        "section": "server",
        "title": "Server overhead",
        "command": " ".join([*set_to, "python benchmarks/server_overhead.py", shlex.join(sys.argv[1:])]).strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "date": datetime.now(UTC).date().isoformat(),
        "tables": [
            {
                "title": f"{args.batch} requests at once, prompt {args.input_len}, output {args.output_len}, "
                f"on {args.model}",
                "columns": ["round", "LLM.generate, tokens/s", "HTTP streaming, tokens/s", "ratio"],
                "rows": [[name, f"{a:.1f}", f"{b:.1f}", f"{b / a:.3f}"] for name, (a, b) in named],
            }
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
