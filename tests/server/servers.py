"""Real server processes on loopback, started in a moment: a fork server has everything imported."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.server.process", "engine.server.lifecycle", "engine.tracing"])


def _run(faults: dict[str, Any], argv: list[str], log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(os.path.dirname(log))
    from tests.server import process

    sys.argv = ["process", json.dumps(faults), *argv]
    sys.exit(process.main())


class Server:
    """One `lawful serve` over the KV oracle.

    url: where it listens.  log: what it has said so far.
    until: what it has said when it is ready for the test.
    """

    def __init__(self, *flags: str, until: str = r"on (http://\S+)", **faults: Any) -> None:
        self._dir = tempfile.TemporaryDirectory()
        self.dir = Path(self._dir.name)
        path = self.dir / "log"
        path.touch()
        self._path = path
        argv = ["serve", "--port", "0", "--device", "cpu", *flags]
        self.process = _context.Process(target=_run, args=(faults, argv, str(path)), daemon=True)
        self.process.start()
        found = wait_for(lambda: re.search(until, self.log) or not self.process.is_alive(), 120)
        if not isinstance(found, re.Match):
            said = self.log
            self.stop()
            raise AssertionError(f"the server did not start:\n{said}")
        self.url = found[found.re.groups]

    @property
    def log(self) -> str:
        return self._path.read_text()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.pid, number)

    def exit_code(self, timeout: float = 15) -> int | None:
        """Wait for its end."""
        self.process.join(timeout)
        return self.process.exitcode

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self._dir.cleanup()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return request(self.url + path, None, headers)[:2]

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        return request(self.url + path, body, headers)[:2]

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, without the label of the model."""
        return samples(self.get("/metrics")[1])

    def queues(self) -> tuple[int, int, int]:
        """Lengths of running, swapped and waiting."""
        now = self.metrics()
        return tuple(int(now[f"lawful:num_requests_{name}"]) for name in ("running", "swapped", "waiting"))  # type: ignore[return-value]

    def idle(self) -> bool:
        """Nothing is left of anything."""
        now = self.metrics()
        used = [now[f'lawful:{device}_blocks{{state="referenced"}}'] for device in ("gpu", "cpu")]
        return self.queues() == (0, 0, 0) and used == [0, 0]

    def check_balance(self) -> None:
        """received = finished by reason + unfinished."""
        now = self.metrics()
        ended = sum(value for name, value in now.items() if name.startswith("lawful:request_success_total"))
        unfinished = sum(now[f"lawful:num_requests_{name}"] for name in ("running", "swapped", "waiting"))
        assert now["lawful:requests_received_total"] == ended + unfinished

    def check_quiet(self) -> None:
        """Nothing went wrong as far as its log knows."""
        assert not re.search(r"ERROR|CRITICAL|Traceback|Exception", self.log), self.log


@contextlib.contextmanager
def running(*flags: str, **faults: Any) -> Iterator[Server]:
    server = Server(*flags, **faults)
    try:
        yield server
    finally:
        server.stop()


def samples(text: str) -> dict[str, float]:
    """Samples of a Prometheus page: name{labels} -> value, the label model_name left out."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r',?model_name="[^"]*",?', "", name).replace("{}", "")
            found[name] = float(value)
    return found


def request(url: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    """Status, body (parsed if it is JSON) and headers."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    wire = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in (headers or {}).items()}}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, wire), timeout=60) as answer:
            status, content, got = answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            status, content, got = error.code, error.read(), error.headers
    text = content.decode()
    return status, json.loads(text) if "json" in (got.get("Content-Type") or "") else text, got


def wait_for(happened: Callable[[], Any], seconds: float = 20) -> Any:
    """The first true value; the test fails if there is none in time."""
    end = time.monotonic() + seconds
    while not (value := happened()):
        assert time.monotonic() < end, "that never happened"
        time.sleep(0.02)
    return value
