"""The command `lawful`: generate, chat, serve, top, bench, demo, simulate, check, audit, replay.

Everything heavy is imported inside the command that needs it, so that --help and --version answer at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from engine import __version__, serve_cli
from engine.logs import formatter, refusals_are_told
from engine.simulate.arguments import add_simulate

if TYPE_CHECKING:
    from engine.config import EngineArgs
    from engine.sampling import SamplingParams

PROG = "lawful"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status: 0, 1 for an error that was explained, 2 for wrong usage, 130 on Ctrl-C."""
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:2] == ["bench", "throughput"]:
        del words[1]  # the default kind, spelled out
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return 2
    _set_up_logging(args)
    try:
        return int(args.run(args) or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader has left; Python would complain once more at exit
        return 0
    except (ValueError, OSError, MemoryError) as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1


def _set_up_logging(args: argparse.Namespace) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(formatter())
    logger = logging.getLogger("lawful")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.WARNING if args.quiet else logging.INFO)


# the parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG, description="An LLM inference engine whose scheduler is formally specified and model-checked."
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, formatter_class=Formatter)
        sub.add_argument("-q", "--quiet", action="store_true", help="no progress, no log line, warnings only")
        sub.set_defaults(run=run)
        return sub

    generate = command("generate", _generate, "Complete one or more prompts.")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to complete; '-' reads standard input")
    generate.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    generate.add_argument("--json", action="store_true", help="one JSON object a prompt instead of text")
    add_engine_args(generate)
    _add_sampling_args(generate, max_tokens=128)

    chat = command("chat", _chat, "Talk with the model in the terminal; the answer appears as it is made.")
    chat.add_argument("--system", help="system message of the conversation")
    add_engine_args(chat)
    _add_sampling_args(chat, max_tokens=512, n=False)

    serve_cli.add_serve(command)
    serve_cli.add_top(command)

    bench = command("bench", _bench, "Measure throughput on prompts of synthetic lengths; or a server: bench serve.")
    _add_bench_args(bench)
    kinds = bench.add_subparsers(dest="kind", metavar="kind")
    serve_cli.add_bench_serve(kinds, Formatter)

    demo = command("demo", _demo, "Answer real prompts under memory pressure and show what the scheduler did.")
    demo.add_argument("--num-prompts", type=int, default=16, help="how many of the sample prompts")
    demo.add_argument("--max-tokens", type=int, default=48, help="tokens of each answer")
    demo.add_argument("--n", type=int, default=2, help="answers to each prompt")
    add_engine_args(demo, dtype="float16", num_gpu_blocks_override=48, num_cpu_blocks_override=24, max_model_len=512)

    add_simulate(command)

    check = command("check", _check, "Prove the laws of the scheduler, or of your own policy, at small scope.")
    check.add_argument(
        "--policy",
        metavar="MODULE:CLASS",
        help="a scheduler class, as module:Class or path.py:Class (docs/policies.md)",
    )
    check.add_argument("--json", action="store_true", help="print one JSON line")

    audit = command("audit", _audit, "Check every line of a recorded trace against the laws (see --record-trace).")
    audit.add_argument("trace", metavar="TRACE", help="the file that --record-trace or record_trace= wrote")
    audit.add_argument("--json", action="store_true", help="print one JSON line")

    replay = command("replay", _replay, "Run a broken law again from the file that its error names.")
    replay.add_argument("file", metavar="FILE", help="a dump of LAWFUL_CONTRACTS=on, by default in .lawful/")
    replay.add_argument(
        "--policy", metavar="MODULE:CLASS", help="the scheduler, if not the class that the dump names; or path.py:Class"
    )
    return parser


def _add_bench_args(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--num-prompts", type=int, default=16, help="requests, all queued at once")
    bench.add_argument("--input-len", type=int, default=128, help="prompt tokens of each")
    bench.add_argument("--output-len", type=int, default=64, help="tokens to generate for each, end tokens ignored")
    bench.add_argument("--n", type=int, default=1, help="completions of each prompt")
    bench.add_argument("--temperature", type=float, default=1.0, help="0 for greedy")
    bench.add_argument("--json", action="store_true", help="print one JSON line")
    bench.add_argument("--output-json", metavar="FILE", help="write the same JSON to a file")
    add_engine_args(bench)


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except the uninformative None."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


_ENGINE_HELP = {
    "model": "a Hugging Face directory, a .gguf file, or smollm2-135m (embedded)",
    "tokenizer": "where the tokenizer is, if not with the model",
    "dtype": "auto, float32, float16 or bfloat16",
    "kv_cache_dtype": "auto (the model's), fp8 or fp8_e4m3: 8 bits for keys and values",
    "quantization": "gguf: multiply a few rows with the 4 or 8 bits of a .gguf file as they are, on a CPU",
    "seed": "of the engine: draws of requests without a seed follow from it",
    "max_model_len": "most tokens of a sequence (default: the model's)",
    "block_size": "tokens of a KV cache block",
    "max_num_batched_tokens": "most tokens of a step (default: 2048)",
    "max_num_seqs": "most sequences of a step (default: 256)",
    "enable_chunked_prefill": "decodes first, prompts in pieces; --no-... for whole prompts first",
    "preemption_mode": "swap or recompute (default: by the number of sequences)",
    "swap_space": "GiB of main memory for swapped groups",
    "gpu_memory_utilization": "part of the free memory that the KV pool may take",
    "num_gpu_blocks_override": "size of the KV pool in blocks",
    "num_cpu_blocks_override": "size of the swap area in blocks",
    "watermark": "part of the pool that admissions leave free",
    "device": "auto, cpu or cuda",
    "load_format": "auto, safetensors, pt, gguf or dummy",
    "disable_log_stats": "no log line every five seconds",
    "record_trace": "write the scheduler's trace to this file, one JSON line a step (see lawful audit)",
}
_TYPES: dict[str, type] = {"str": str, "int": int, "float": float}


def add_engine_args(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    from engine.config import EngineArgs

    group = parser.add_argument_group("engine")
    for item in fields(EngineArgs):
        if item.name not in _ENGINE_HELP:
            continue
        flag = "--" + item.name.replace("_", "-")
        default = defaults.get(item.name, item.default)
        kind = str(item.type).split(" |")[0]
        if kind == "bool":
            action: Any = argparse.BooleanOptionalAction if default else "store_true"
            group.add_argument(flag, action=action, default=default, help=_ENGINE_HELP[item.name])
        else:
            metavar = {"int": "N", "float": "X"}.get(kind, "NAME")
            group.add_argument(flag, type=_TYPES[kind], default=default, metavar=metavar, help=_ENGINE_HELP[item.name])


def _add_sampling_args(parser: argparse.ArgumentParser, max_tokens: int, n: bool = True) -> None:
    group = parser.add_argument_group("sampling")
    if n:
        group.add_argument("--n", type=int, default=1, metavar="N", help="completions of each prompt")
        group.add_argument("--best-of", type=int, metavar="N", help="branches to choose the completions from")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help="most tokens to generate")
    group.add_argument("--min-tokens", type=int, default=0, metavar="N", help="no end before this many tokens")
    group.add_argument("--temperature", type=float, default=0.7, metavar="X", help="0 for greedy")
    group.add_argument("--top-p", type=float, default=1.0, metavar="X", help="nucleus")
    group.add_argument("--top-k", type=int, default=-1, metavar="N", help="this many most likely tokens; -1 for all")
    group.add_argument("--min-p", type=float, default=0.0, metavar="X", help="part of the best token's probability")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="-2 to 2")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="-2 to 2")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 0, at most 2")
    group.add_argument("--sampling-seed", type=int, metavar="N", help="seed of each request")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end token")


def engine_args(args: argparse.Namespace) -> EngineArgs:
    from engine.config import EngineArgs

    given = {name: getattr(args, name) for name in EngineArgs.names() if hasattr(args, name)}
    given["disable_log_stats"] = given.get("disable_log_stats", False) or args.quiet
    return EngineArgs(**given)


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    from engine.sampling import SamplingParams

    return SamplingParams(
        n=getattr(args, "n", 1),
        best_of=getattr(args, "best_of", None),
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty,
        seed=args.sampling_seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )


def _load(args: argparse.Namespace) -> Any:
    from engine.llm import LLM, build_core

    return LLM.from_core(build_core(engine_args(args)))


# the commands


def _generate(args: argparse.Namespace) -> int:
    params = _sampling_params(args)
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompts]
    llm = _load(args)
    bar = not args.quiet and len(prompts) > 1
    with refusals_are_told():
        if args.chat:
            outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params, use_tqdm=bar)
        else:
            outputs = llm.generate(prompts, params, use_tqdm=bar)
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=1):
        if args.json:
            print(json.dumps(_as_json(prompt, output), ensure_ascii=False))
        elif output.error:
            print(f"{PROG}: error: prompt {number}: {output.error}", file=sys.stderr)
        else:
            for completion in output.outputs:
                label = f"[{completion.index}] " if len(output.outputs) > 1 else ""
                print(label + ("" if args.chat else prompt) + completion.text)
    return 1 if any(output.error for output in outputs) else 0


def _as_json(prompt: str, output: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "error": output.error,
        "outputs": [
            {
                "index": completion.index,
                "text": completion.text,
                "tokens": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for completion in output.outputs
        ],
    }


def _chat(args: argparse.Namespace) -> int:
    from engine.terminal import converse

    params = _sampling_params(args)
    args.disable_log_stats = True
    return converse(_load(args).core, params, args.system)


def _bench(args: argparse.Namespace) -> int:
    from engine.bench import throughput

    for name in ("num_prompts", "input_len", "output_len", "n"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    result = throughput(
        engine_args(args),
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        n=args.n,
        temperature=args.temperature,
        progress=not (args.quiet or args.json),
    )
    line = json.dumps(result)
    if args.output_json:
        with open(args.output_json, "w") as file:
            file.write(line + "\n")
    if args.json:
        print(line)
    else:
        print(
            f"Throughput: {result['requests_per_s']:.2f} requests/s, "
            f"{result['total_tokens_per_s']:.1f} total tokens/s, {result['output_tokens_per_s']:.1f} output tokens/s"
        )
    return 0


def _demo(args: argparse.Namespace) -> int:
    from engine.demo import demo

    return demo(engine_args(args), args.num_prompts, args.n, args.max_tokens, progress=not args.quiet)


def _check(args: argparse.Namespace) -> int:
    from engine.check import run

    return run(args.policy, args.json, progress=not args.quiet)


def _audit(args: argparse.Namespace) -> int:
    from engine.verify import audit_trace

    return audit_trace(args.trace, args.json)


def _replay(args: argparse.Namespace) -> int:
    from engine.verify import replay_dump

    return replay_dump(args.file, args.policy)


if __name__ == "__main__":
    sys.exit(main())
