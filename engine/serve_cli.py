"""The commands around the server: `lawful serve`, `lawful top`, `lawful bench serve`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.server.options import ServerOptions

Command = Callable[[str, Any, str], argparse.ArgumentParser]


def add_serve(command: Command) -> None:
    """`lawful serve [MODEL]`."""
    from engine.cli import add_engine_args

    serve = command("serve", _serve, "Serve a model over HTTP, as the OpenAI API does; without MODEL the embedded one.")
    serve.add_argument("model_name", nargs="?", metavar="MODEL", help="as --model")
    group = serve.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="where to listen")
    add("--port", type=int, default=8000, metavar="N", help="0 takes a free port")
    add("--api-key", action="append", metavar="KEY", help="needed in requests; may be repeated (also LAWFUL_API_KEY)")
    add("--served-model-name", nargs="+", metavar="NAME", help="what requests call the model; the first is shown")
    add("--chat-template", metavar="FILE", help="a Jinja template, as a file or as text, used instead of the model's")
    add("--trust-request-chat-template", action="store_true", help="let requests bring a template: it may run for ever")
    add("--max-queued-requests", type=int, default=1024, metavar="N", help="more that wait get 429")
    add("--max-body-bytes", type=int, default=8 << 20, metavar="N", help="larger bodies get 413")
    add("--drain-timeout", type=float, default=30.0, metavar="X", help="seconds that SIGTERM gives unfinished requests")
    add("--stall-timeout", type=float, default=60.0, metavar="X", help="seconds without a step until /health says 503")
    add("--max-failed-steps", type=int, default=5, metavar="N", help="failed steps in a row until the server gives up")
    add("--write-timeout", type=float, default=120.0, metavar="X", help="seconds until a reader that stops is cut off")
    add("--enable-debug", action="store_true", help="GET /debug/scheduler")
    add("--enable-ui", action="store_true", help="the page /ui, and with it /debug/scheduler")
    add("--dump-dir", default=".lawful", metavar="DIR", help="where a failed step leaves the state; '' for nowhere")
    add("--otlp-traces-endpoint", metavar="URL", help="where OpenTelemetry spans go (needs lawful[otel])")
    add_engine_args(serve)


def add_top(command: Command) -> None:
    """`lawful top URL`."""
    top = command("top", _top, "Show a running server's queues, blocks and rates, live (it needs --enable-debug).")
    top.add_argument("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="of the server")
    top.add_argument("--interval", type=float, default=0.5, metavar="X", help="seconds between two looks")
    top.add_argument("--once", action="store_true", help="print one look and end")
    top.add_argument("--api-key", metavar="KEY", help="if the server needs one (also LAWFUL_API_KEY)")


def add_bench_serve(kinds: Any, formatter: Any) -> None:
    """`lawful bench serve`."""
    text = "A running server: requests arrive by themselves, whether or not it keeps up."
    bench = kinds.add_parser("serve", help=text, description=text, formatter_class=formatter)
    add = bench.add_argument
    add("-q", "--quiet", action="store_true", default=argparse.SUPPRESS, help="no progress")
    add("--url", default="http://127.0.0.1:8000", metavar="URL", help="of the server")
    add("--api-key", metavar="KEY", help="if the server needs one (also LAWFUL_API_KEY)")
    add("--served-model", metavar="NAME", help="model to ask for (default: the server's first)")
    add("--num-prompts", type=int, default=100, metavar="N", help="requests")
    add(
        "--request-rate", type=float, default=float("inf"), metavar="X", help="mean arrivals a second; inf: all at once"
    )
    add("--burstiness", type=float, default=1.0, metavar="X", help="1: Poisson; below: bursts; above: more even")
    add("--max-concurrency", type=int, metavar="N", help="most requests open at a time; arrivals beyond wait here")
    add("--trace", metavar="FILE", help="CSV with arrival_s, prompt_tokens, output_tokens instead of rate and lengths")
    add("--scale", type=float, default=1.0, metavar="X", help="divide the trace's lengths by this (at least 1 token)")
    add("--speed", type=float, default=1.0, metavar="X", help="play the trace so many times as fast")
    add("--input-len", type=int, default=128, metavar="N", help="prompt tokens of each request")
    add("--output-len", type=int, default=64, metavar="N", help="tokens to generate for each")
    add("--vocab-size", type=int, default=256, metavar="N", help="prompts are random token ids below this")
    add("--no-ignore-eos", action="store_true", help="let end tokens end an answer")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")
    add("--timeout", type=float, default=600.0, metavar="X", help="seconds that one request may take")
    add("--json", action="store_true", help="print one JSON line")
    add("--output-json", metavar="FILE", help="write the same JSON to a file, with every request's times")
    bench.set_defaults(run=_bench_serve)


def _key(args: argparse.Namespace) -> str | None:
    key: str | None = args.api_key or os.environ.get("LAWFUL_API_KEY")
    return key


def _serve(args: argparse.Namespace) -> int:
    from engine.server.signals import end_on_signal

    end_on_signal()  # before the imports, which take seconds
    from engine.cli import engine_args
    from engine.llm import build_core
    from engine.server.lifecycle import listen, serve
    from engine.tracing import start_tracing

    if args.model_name is not None:
        args.model = args.model_name
    options = server_options(args)
    listener = listen(options.host, options.port)  # a port in use is noticed before a model is loaded
    tracer = start_tracing(options.otlp_traces_endpoint, args.model) if options.otlp_traces_endpoint else None
    core = build_core(engine_args(args))
    core.observer = tracer
    if core.tokenizer is not None and (options.chat_template or core.tokenizer.chat_template):
        _warm_up(core.tokenizer, options.chat_template)
    return serve(core, options, args.model, listener)


def _warm_up(tokenizer: Any, template: str | None) -> None:
    """Import what the first chat would wait for, and find a template that does not parse."""
    message = {"role": "user", "content": "Hello"}
    try:
        tokenizer.apply_chat_template([message], chat_template=template)
    except ValueError as error:
        if "TemplateSyntaxError" in str(error):
            raise
        logging.getLogger("lawful").warning("the chat template refuses a plain greeting: %s", error)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """The server's part of the command line.  Raises ConfigError."""
    from engine.server.options import ServerOptions

    keys = args.api_key or ([os.environ["LAWFUL_API_KEY"]] if os.environ.get("LAWFUL_API_KEY") else [])
    template: str | None = args.chat_template
    if template is not None and "{" not in template:  # a template without braces would say nothing
        template = Path(template).read_text(encoding="utf-8")
    return ServerOptions(
        host=args.host,
        port=args.port,
        api_keys=tuple(keys),
        served_model_names=tuple(args.served_model_name or ()),
        chat_template=template,
        trust_request_chat_template=args.trust_request_chat_template,
        max_queued_requests=args.max_queued_requests,
        max_body_bytes=args.max_body_bytes,
        drain_timeout=args.drain_timeout,
        stall_timeout=args.stall_timeout,
        max_failed_steps=args.max_failed_steps,
        write_timeout=args.write_timeout,
        enable_debug=args.enable_debug,
        enable_ui=args.enable_ui,
        dump_dir=Path(args.dump_dir) if args.dump_dir else None,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
    )


def _top(args: argparse.Namespace) -> int:
    from engine.top import top

    return top(args.url, _key(args), args.interval, args.once)


def _bench_serve(args: argparse.Namespace) -> int:
    from engine.bench_serve import Load, report, run

    load = Load.of(args)
    result = run(load, args.url, _key(args), progress=not (args.quiet or args.json))
    return report(result, args.json, args.output_json, sys.stdout)
