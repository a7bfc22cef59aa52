"""A conversation in the terminal: the answer appears as it is made, Ctrl-C stops an answer, Ctrl-D ends."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from engine.core import EngineCore
from engine.errors import InvalidPromptError, RefusedError
from engine.sampling import SamplingParams

HELP = "Type a message. /reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer."


def converse(core: EngineCore, params: SamplingParams, system: str | None) -> int:
    """Read messages from standard input until it ends; 0."""
    if core.tokenizer is None:
        raise InvalidPromptError("a conversation needs the tokenizer; leave skip_tokenizer_init off")
    opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    interactive = sys.stdin.isatty()
    if interactive:
        _enable_line_editing()
        print(HELP)
    turn = 0
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return 0
        except KeyboardInterrupt:
            print("\n" + HELP)
            continue
        if text in ("/exit", "/quit"):
            return 0
        if text == "/reset":
            messages = list(opening)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        turn += 1
        try:
            answer = _answer(core, messages, params, f"chat-{turn}")
        except RefusedError as error:
            print(f"{error}. /reset starts a new conversation.", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def _answer(core: EngineCore, messages: list[dict[str, Any]], params: SamplingParams, name: str) -> str:
    """Stream one answer; what there was of it if the user stops it."""
    assert core.tokenizer is not None
    prompt = core.tokenizer.apply_chat_template(messages)
    core.add_request(name, core.tokenizer.encode(prompt, add_special_tokens=False), params, prompt_text=prompt)
    shown = ""
    try:
        while core.has_unfinished_requests():
            shown = _show(core, shown)
    except KeyboardInterrupt:
        core.abort_request(name)
        while core.has_unfinished_requests():
            shown = _show(core, shown)
        print(" [stopped]", end="")
    print(flush=True)
    return shown


def _show(core: EngineCore, shown: str) -> str:
    for output in core.step():
        if output.error:
            print(f"\n{output.error}", file=sys.stderr)
        text = output.outputs[0].text
        print(text[len(shown) :], end="", flush=True)
        shown = text
    return shown


def _enable_line_editing() -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it is what enables history and arrow keys in input()
