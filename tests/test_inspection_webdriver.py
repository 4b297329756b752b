"""A browser for the page's tests: Debian's chromium, driven over the WebDriver protocol.

``Browser`` speaks the few commands that the tests need, so that no client library is installed for them.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("chromium", "chromium-driver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
KEYS = {
    "ArrowRight": "\ue014",
    "ArrowLeft": "\ue012",
    "Escape": "\ue00c",
    "Tab": "\ue004",
    "End": "\ue010",
    "Home": "\ue011",
}


def need_chromium() -> tuple[str, str]:
    """The browser and its driver. In CI they are installed where they are absent, or the test fails; elsewhere
    the test is skipped."""
    in_ci = os.environ.get("CI") == "true"
    if not _found() and in_ci and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update"], check=True, capture_output=True)
        subprocess.run(
            ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES],
            check=True,
            capture_output=True,
        )
    found = _found()
    if found is None:
        said = f"the page's tests need {' and '.join(PACKAGES)}; run `apt-get install {' '.join(PACKAGES)}`"
        pytest.fail(said) if in_ci else pytest.skip(said)
    return found


def _found() -> tuple[str, str] | None:
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One browser window. ``prefer``: the colour scheme that the page sees."""

    def __init__(self, address: str, binary: str, profile: Path) -> None:
        self._address = address
        options = {
            "binary": binary,
            "args": [*FLAGS, f"--user-data-dir={profile}"],
            "perfLoggingPrefs": {"enableNetwork": True},
        }
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
        }
        answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{answer['sessionId']}"

    def open(self, path: Path, width: int = 1280, height: int = 900, prefer: str = "light") -> None:
        self.resize(width, height)
        self.prefer(prefer)
        self._call("POST", self._session + "/url", {"url": path.resolve().as_uri()})

    def resize(self, width: int, height: int) -> None:
        # A window has a least width; a viewport has none.
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        self.devtools(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of ``return ...`` in the page."""
        return self._call(
            "POST", self._session + "/execute/sync", {"script": script, "args": list(arguments)}
        )

    def press(self, *keys: str) -> None:
        actions = [
            {"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")
        ]
        self._act({"type": "key", "id": "keyboard", "actions": actions})

    def point(self, selector: str) -> None:
        """Move the mouse onto the middle of the first element that ``selector`` names."""
        x, y = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]",
            selector,
        )
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y), "origin": "viewport"}
        self._act(
            {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        )

    def picture(self) -> bytes:
        return base64.b64decode(self._call("GET", self._session + "/screenshot"))

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What was logged since the last call: ``"browser"`` messages or ``"performance"`` events."""
        return self._call("POST", self._session + "/se/log", {"type": kind})

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        body = {"cmd": command, "params": parameters}
        return self._call("POST", self._session + "/goog/cdp/execute", body)

    def close(self) -> None:
        self._call("DELETE", self._session)

    def _act(self, source: dict[str, Any]) -> None:
        self._call("POST", self._session + "/actions", {"actions": [source]})

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self._address + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                value = json.load(error)["value"]
            raise AssertionError(f"{path}: {value['error']}: {value['message']}") from None


@contextmanager
def started_browser(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile under ``folder``, closed in the end."""
    binary, driver = need_chromium()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "driver.log"
    with log.open("w") as sink:
        process = subprocess.Popen([driver, f"--port={port}"], stdout=sink, stderr=sink)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(address, process, log)
        window = Browser(address, binary, folder / "profile")
        yield window
        window.close()
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(100):
        if process.poll() is None:
            try:
                with urllib.request.urlopen(address + "/status", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
    pytest.fail(f"the driver must start; it said {log.read_text()}")


def test_the_browser_runs_scripts_at_the_width_that_is_asked_for(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><title>a</title><script>window.ran = 3</script>")
    with started_browser(tmp_path) as browser:
        browser.open(page, width=400)
        assert browser.run("return [window.ran, innerWidth, document.title]") == [3, 400, "a"]


def test_without_a_browser_ci_fails_and_others_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium chromium-driver"):
        need_chromium()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium chromium-driver"):
        need_chromium()
