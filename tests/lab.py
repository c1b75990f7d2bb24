"""JupyterLab on this machine and a headless Chromium that opens notebooks in it, both gone when the block ends.

The browser is driven over the DevTools protocol with tornado's websocket client, which comes with Jupyter.
"""

import base64
import contextlib
import importlib.util
import itertools
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from tornado.websocket import WebSocketClientConnection, websocket_connect

STARTED_S = 120  # until a server or a browser that does not answer is given up
WINDOW = (1300, 1500)


def missing() -> str | None:
    """Why no browser can look at JupyterLab here, or None."""
    if importlib.util.find_spec("jupyterlab") is None:
        return "JupyterLab is not installed: pip install 'kvlab[lab]'"
    if chromium() is None:
        return "no Chromium: apt-get install chromium"
    return None


def chromium() -> str | None:
    return next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)


@contextlib.contextmanager
def process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen]:
    """A process whose output goes to a file; it and all it started are gone afterwards."""
    with log.open("wb") as stream:
        streams = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": subprocess.STDOUT}
        started = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    family = [psutil.Process(started.pid)]
    try:
        yield started
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += family[0].children(recursive=True)
        for signal in ("terminate", "kill"):
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    getattr(member, signal)()
            _, family = psutil.wait_procs(family, timeout=20)
        started.wait()
        assert family == [], f"{family} outlive this test"


class Server:
    """JupyterLab over one folder, on 127.0.0.1 and a port of its own, behind a token that no log or argument shows."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self._token = url, token

    @classmethod
    @contextlib.contextmanager
    def start(cls, folder: Path, work: Path, environment: dict[str, str]) -> Iterator["Server"]:
        token = secrets.token_hex(24)
        own = {name: str(work / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
        options = ["--ip=127.0.0.1", "--port=0", "--no-browser", "--log-level=ERROR", "--allow-root"]
        options += [f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True"]
        # Neither news nor updates are asked for: nothing here needs a network, and no notice lies over the notebook.
        quiet = Path(own["JUPYTER_CONFIG_DIR"], "lab/user-settings/@jupyterlab/apputils-extension")
        quiet.mkdir(parents=True)
        settings = {"fetchNews": "false", "checkForUpdates": False}
        (quiet / "notification.jupyterlab-settings").write_text(json.dumps(settings))
        log = work / "server.log"
        command = [sys.executable, "-m", "jupyterlab", *options]
        with process(command, os.environ | environment | own | {"JUPYTER_TOKEN": token}, log) as started:
            try:
                port = _awaited(lambda: _port(Path(own["JUPYTER_RUNTIME_DIR"]), started))
                server = cls(f"http://127.0.0.1:{port}", token)
                yield server
                server._end_kernels()
            except BaseException:
                print(log.read_text(errors="replace").replace(token, "[token]")[-4000:], file=sys.stderr)
                raise

    def page(self, notebook: str) -> str:
        """Where a notebook opens, and nothing that was open before; the token is in it."""
        return f"{self.url}/lab/tree/{notebook}?reset&token={self._token}"

    def _end_kernels(self) -> None:
        for session in self._ask("GET", "/api/sessions"):
            self._ask("DELETE", f"/api/sessions/{session['id']}")

    def _ask(self, method: str, path: str) -> Any:
        headers = {"Authorization": f"token {self._token}"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, method=method, headers=headers)) as reply:
            return json.loads(reply.read() or "null")


def _port(runtime: Path, server: subprocess.Popen) -> int | None:
    assert server.poll() is None, "JupyterLab ended while starting"
    known = [json.loads(text) for path in runtime.glob("jpserver-*.json") if (text := path.read_text())]
    return known[0]["port"] if known else None


def _awaited(ask: Any) -> Any:
    until = time.monotonic() + STARTED_S
    while (found := ask()) is None:
        assert time.monotonic() < until, "given up waiting"
        time.sleep(0.1)
    return found


class Page:
    """One tab. `run` evaluates JavaScript and awaits promises."""

    def __init__(self, socket: WebSocketClientConnection, session: str) -> None:
        self._socket, self._session = socket, session
        self._numbers = itertools.count(1000)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, url: str, work: Path) -> Any:
        profile = work / "profile"
        options = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-first-run"]
        options += [f"--window-size={WINDOW[0]},{WINDOW[1]}", "--hide-scrollbars", "--disable-gpu"]
        options += ["--no-sandbox", "--disable-dev-shm-usage"] if os.geteuid() == 0 else []
        binary = chromium()
        assert binary is not None
        with process([binary, *options, "about:blank"], dict(os.environ), work / "browser.log"):
            port, path = _awaited(lambda: _active(profile / "DevToolsActivePort"))
            socket = await websocket_connect(f"ws://127.0.0.1:{port}{path}", max_message_size=2**28)
            try:
                browser = cls(socket, "")
                target = await browser.send("Target.createTarget", url="about:blank")
                attached = await browser.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
                page = cls(socket, attached["sessionId"])
                await page.send("Page.enable")
                await page.send("Page.navigate", url=url)
                yield page
            finally:
                socket.close()

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol and its result; events are passed over."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        await self._socket.write_message(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            text = await self._socket.read_message()
            assert text is not None, f"the browser hung up during {method}"
            reply = json.loads(text)
            if reply.get("id") == number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited. Raises AssertionError with what the page threw."""
        about = {"awaitPromise": True, "returnByValue": True}
        reply = await self.send("Runtime.evaluate", expression=script, **about)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    async def until(self, script: str) -> Any:
        """Ask until the answer is true."""
        end = time.monotonic() + STARTED_S
        while not (answer := await self.run(script)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.2)
        return answer

    async def picture(self, path: Path) -> None:
        """What the window shows now, as PNG."""
        shot = await self.send("Page.captureScreenshot", format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))


def _active(path: Path) -> tuple[str, str] | None:
    lines = path.read_text().splitlines() if path.exists() else []
    return (lines[0], lines[1]) if len(lines) == 2 else None
