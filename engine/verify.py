"""The commands that check: audit a recorded trace, replay a broken law, and prove a scheduler's laws at small scope."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def audit_trace(path: str, as_json: bool = False) -> int:
    """Print the verdict on a trace; 0 if it is whole and lawful, else 1."""
    from spec.check.trace import audit

    try:
        seen = audit(path)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a trace: it is not text") from None
    rate = seen.lines / max(seen.seconds, 1e-9)
    if as_json:
        print(
            json.dumps(
                {
                    "trace": path,
                    "lawful": seen.lawful,
                    "lines": seen.lines,
                    "steps": seen.steps,
                    "groups": seen.groups,
                    "tokens": seen.tokens,
                    "failed_steps": seen.failed_steps,
                    "actions": dict(seen.verbs),
                    "lines_per_s": round(rate),
                    "findings": [
                        {"line": one.line, "law": one.law.id if one.law else None, "text": str(one)}
                        for one in seen.findings
                    ],
                }
            )
        )
        return 0 if seen.lawful else 1
    for finding in seen.findings:
        print(f"{path}: {finding}")
    if seen.lawful:
        print(f"{path}: lawful, from the header to the trailer")
    else:
        print(f"{path}: not lawful; nothing after line {seen.findings[0].line} was read")
    print(
        f"  {seen.lines:,} lines, {seen.steps:,} steps ({seen.failed_steps:,} failed), {seen.groups:,} requests, "
        f"{seen.tokens:,} tokens; {rate:,.0f} lines/s"
    )
    if seen.verbs:
        print("  " + ", ".join(f"{verb.replace('_', ' ')} {count:,}" for verb, count in sorted(seen.verbs.items())))
    return 0 if seen.lawful else 1


def replay_dump(path: str, policy: str | None = None) -> int:
    """Run a dumped violation again and show it; 1 if a law breaks again, 0 if all hold now.

    policy: module:Class or path.py:Class, if not the class that the dump names.
    """
    from engine.check import load_policy
    from engine.scheduler.replay import replay

    sys.path.insert(0, str(Path.cwd()))  # the scheduler's class may be the user's own
    try:
        run = replay(path, None if policy is None else load_policy(policy))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a dump of a broken law: {type(error).__name__}: {error}") from None
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"the scheduler that {path} was written by cannot be imported: {error}; say where it is: "
            "--policy path.py:Class"
        ) from None
    print(run.timeline)
    if not run.reproduced:
        print(f"{path}: {run.expected} was broken then; now every law holds")
    elif run.expected in run.broken:
        print(f"{path}: {run.expected} is broken again")
    else:
        print(f"{path}: {run.expected} was broken then; broken now: {', '.join(run.broken)}")
    return 1 if run.reproduced else 0
