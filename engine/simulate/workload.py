"""A trace of requests, read line by line: when each comes, and how long its prompt and its answer are.

A CSV file with a header.  Columns `prompt_tokens` and `output_tokens` are needed; `arrival_s` (seconds, ascending) may
be absent, and then arrivals are a Poisson process; any other column is ignored.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

NEEDED = ("prompt_tokens", "output_tokens")
ARRIVAL = "arrival_s"


class Request(NamedTuple):
    """One request.  arrival: seconds.  prompt_tokens, output_tokens: tokens, of each branch for the latter."""

    arrival: float
    prompt_tokens: int
    output_tokens: int


def read_trace(
    path: str | Path,
    *,
    rate: float = 1.0,
    scale: float = 1.0,
    spread: float = 0.0,
    repeat: int = 1,
    limit: int | None = None,
    seed: int = 0,
) -> Iterator[Request]:
    """The requests of a trace in its order, one at a time; no more than one bunch of equal arrivals is held.

    rate: arrivals come this many times as fast.  A trace without arrivals has one request a second on average, as a
        Poisson process of this seed, before that.
    scale: lengths are divided by it, to at least 1 where they were.
    spread: requests that come at one moment are spread evenly over this many seconds after it, and no further than to
        the next moment: for traces whose clock is coarse.
    repeat: how often the trace is played, each time a mean gap after the last.  limit: stop after so many requests.

    Raises ValueError, with file, line and what is allowed, for a line that is no request; OSError for no such file.
    """
    rows = _bunches(_repeated(path, repeat, seed), spread) if spread > 0 else _repeated(path, repeat, seed)
    for arrival, prompt, output in islice(rows, limit):
        yield Request(arrival / rate, _scaled(prompt, scale), _scaled(output, scale))


def count_lines(path: str | Path) -> int:
    """Lines after the header, for progress: quick, and not checked."""
    lines, last = 0, b"\n"
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            lines += piece.count(b"\n")
            last = piece[-1:]
    return max(0, lines - (last == b"\n"))


def _scaled(tokens: int, scale: float) -> int:
    return tokens if scale == 1 or tokens == 0 else max(1, int(tokens / scale))


def _repeated(path: str | Path, repeat: int, seed: int) -> Iterator[Request]:
    rng = random.Random(seed)
    offset = last = 0.0
    for _ in range(repeat):
        first, seen = None, 0
        for request in _rows(path, rng):
            first = request.arrival if first is None else first
            seen += 1
            last = offset + request.arrival
            yield request._replace(arrival=last)
        if first is None:
            raise ValueError(f"{path} has no requests, only a header; one line a request is needed")
        span = last - offset - first
        offset = last - first + (span / (seen - 1) if seen > 1 else 0.0)


def _bunches(requests: Iterator[Request], spread: float) -> Iterator[Request]:
    """Requests of one moment spread over `spread` seconds, or to the next moment if that is sooner."""
    bunch: list[Request] = []
    for request in requests:
        if bunch and request.arrival > bunch[0].arrival:
            yield from _spread(bunch, min(spread, request.arrival - bunch[0].arrival))
            bunch = []
        bunch.append(request)
    yield from _spread(bunch, spread)


def _spread(bunch: list[Request], seconds: float) -> Iterator[Request]:
    for place, request in enumerate(bunch):
        yield request._replace(arrival=request.arrival + seconds * place / len(bunch))


def _rows(path: str | Path, rng: random.Random) -> Iterator[Request]:
    with open(path, newline="", encoding="utf-8") as file:
        lines = csv.reader(file)
        try:
            header = [name.strip() for name in next(lines, [])]
            for name in NEEDED:
                if name not in header:
                    raise ValueError(
                        f"{path}, line 1: the header has no column {name}; a trace has {', '.join(NEEDED)} and, "
                        f"if it knows them, {ARRIVAL}"
                    )
            prompt, output = (header.index(name) for name in NEEDED)
            arrival = header.index(ARRIVAL) if ARRIVAL in header else None
            moment = 0.0
            for number in count():
                row = next(lines, None)
                if row is None:
                    return
                if not row:
                    continue  # an empty line says nothing
                where = f"{path}, line {lines.line_num}"
                if len(row) != len(header):
                    raise ValueError(f"{where}: there are {len(row)} fields; the header names {len(header)}")
                if arrival is not None:
                    moment = _moment(row[arrival], moment, where)
                elif number:
                    moment += rng.expovariate(1.0)
                yield Request(moment, _tokens(row, prompt, NEEDED[0], where), _tokens(row, output, NEEDED[1], where))
        except csv.Error as error:
            raise ValueError(f"{path}, line {lines.line_num}: {error}; a trace is a CSV file") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, after line {lines.line_num}: {error}; a trace is UTF-8 text") from None


def _tokens(row: Sequence[str], place: int, name: str, where: str) -> int:
    text = row[place].strip()
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"{where}: {name} is {text[:40]!r}; it must be an int of at least 0")
    return int(text)


def _moment(text: str, last: float, where: str) -> float:
    try:
        moment = float(text)
    except ValueError:
        moment = math.nan
    if not 0 <= moment < math.inf:
        raise ValueError(f"{where}: {ARRIVAL} is {text.strip()[:40]!r}; it must be a number of seconds of at least 0")
    if moment < last:
        raise ValueError(f"{where}: {ARRIVAL} is {moment:g} after {last:g}; arrivals must be in order")
    return moment
