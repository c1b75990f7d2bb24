"""The page in a real browser, from disk, with every host unresolvable: all figures show, in both themes."""

import html
import json
import re
import shutil
import subprocess

import pytest
from PIL import Image

from kvlab.report import html as page
from kvlab.report.figures import of_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install Debian's chromium to run this")
# Appended to a copy only: pages themselves hold no script.
_ASK = """<script>addEventListener("load", () => {
  const found = [...document.images].map(i => ({alt: i.alt, width: i.naturalWidth, done: i.complete,
    src: i.currentSrc.slice(0, 15)}));
  const asked = performance.getEntriesByType("resource").map(e => e.name.slice(0, 5));
  document.body.setAttribute("data-found", JSON.stringify({found, asked}));
})</script>"""


def chromium(folder, *flags):
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
        *(f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1100,1600"),
        *flags,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def written(tmp_path_factory, search):
    folder = tmp_path_factory.mktemp("browser")
    text = page(search, of_run(search), {"python": "3.11"})
    (folder / "report.html").write_text(text)
    (folder / "asked.html").write_text(text.replace("</body>", f"{_ASK}</body>"))
    return folder


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_figure_shows_in_both_themes(written, theme):
    scheme = "--blink-settings=preferredColorScheme=" + ("0" if theme == "dark" else "1")
    seen = chromium(written, scheme, "--dump-dom", f"file://{written}/asked.html")
    told = re.search(r'data-found="([^"]*)"', seen.stdout)
    assert told, seen.stderr[-500:]
    found = json.loads(html.unescape(told[1]))
    assert len(found["found"]) == 4
    assert all(i["done"] and i["width"] > 300 and i["alt"] for i in found["found"])
    assert set(found["asked"]) <= {"data:"}
    shot = written / f"{theme}.png"
    chromium(written, scheme, f"--screenshot={shot}", f"file://{written}/report.html")
    with Image.open(shot) as image:
        corner, colours = image.convert("RGB").getpixel((2, 2)), image.convert("RGB").getcolors(1 << 20)
    assert corner == ((255, 255, 255) if theme == "light" else (0x15, 0x18, 0x1C))
    assert len(colours) > 50  # text and figures, not a blank page
