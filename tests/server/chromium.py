"""Headless Chromium over its own pipe: no driver and no package in between."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str | None:
    """The browser's path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab.  Commands are those of the DevTools protocol: JSON objects ended by a zero byte."""

    def __init__(self, path: str, url: str, dark: bool = False) -> None:
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def wire() -> None:  # the browser reads from descriptor 3 and writes to 4
            high = [os.dup(fd) for fd in (to_browser, from_browser)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--disable-dev-shm-usage",
        ]
        self._process = subprocess.Popen(
            [path, *flags, f"--user-data-dir={self._home.name}", "--no-first-run", "about:blank"],
            preexec_fn=wire,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._number = 0
        self.messages: list[Any] = []  # events: console output, exceptions, requests
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=1400, height=1000, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=url)

    def call(self, method: str, **params: Any) -> Any:
        """One command and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                data = os.read(self._read, 1 << 16)
                assert data, "the browser has ended"
                self._rest += data
            raw, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(raw)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.messages.append(answer)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 30) -> Any:
        """Until it is true."""
        end = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"never: {expression}; page: {self.value('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        """A key goes down and up."""
        text = key if len(key) == 1 else "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if kind == "keyDown" and text else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **more)

    def picture(self, path: str) -> None:
        """A screenshot."""
        import base64

        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def problems(self) -> list[Any]:
        """Exceptions, errors in the console, and requests to anywhere but the server."""
        found = []
        for message in self.messages:
            method, params = message.get("method", ""), message.get("params", {})
            if method == "Runtime.exceptionThrown" or (
                method == "Log.entryAdded" and params["entry"]["level"] == "error"
            ):
                found.append(params)
            if method == "Network.requestWillBeSent":
                address = params["request"]["url"]
                if not address.startswith(("http://127.0.0.1:", "data:", "about:")):
                    found.append(address)
        return found

    def close(self, wait: Callable[..., Any] | None = None) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._write)
        os.close(self._read)
        self._home.cleanup()
