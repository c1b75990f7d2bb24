"""Notebooks as a person sees them: JupyterLab in a real browser, all cells run, figure and cache in both themes.

Skipped where JupyterLab or Chromium is missing. Pictures go to the folder that KVLAB_ARTEFACTS names, by default
`runs/browser` of the checkout; they are there to be looked at.
"""

import asyncio
import json
import os
from pathlib import Path

import lab
import nbformat
import pytest
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from tiny_folder import save_tiny

ROOT = Path(__file__).resolve().parents[2]
REASON = lab.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SMALL_SEARCH = {"budget_gb": 0.0018, "context": 4096, "concurrency": 1, "minutes": 0.1, "trials": 10, "items": 4}
# The notebook, what makes it small, the cell of its figure, the cell that shows a cache.
BOOKS = {
    "00_quickstart": ({}, "formats", "cache"),
    "04_find_the_sweet_spot": (SMALL_SEARCH | {"families": "retrieval,math"}, "search", "use"),
}
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}

BROWSED = """from kvlab.explore.picture import Picture, sheet
from kvlab.explore.widgets import browse
import pandas as pd

def draw(side):
    figure, axes = sheet(1, 1, width=side, height=2.0)
    return Picture(figure, pd.DataFrame(), f"a figure {side} inches wide, for the test of controls")

browse(draw, side=[5.0, 8.0])
"""
IMAGES = """[...jupyterapp.shell.currentWidget.content.widgets[0].outputArea.node.querySelectorAll('img')]
  .map(image => image.naturalWidth)"""
HANDLE = """(() => { const handle = document.querySelector('.noUi-handle');
  if (handle) handle.focus(); return !!handle; })()"""

READY = """(() => {
  const panel = window.jupyterapp && jupyterapp.shell.currentWidget;
  return !!(panel && panel.context && panel.context.path === %s && panel.context.isReady && panel.sessionContext.isReady
    && panel.sessionContext.session && panel.sessionContext.session.kernel);
})()"""
RUN = "jupyterapp.commands.execute('notebook:run-all-cells').then(() => true)"
CELLS = """jupyterapp.shell.currentWidget.content.widgets.filter(w => w.model.type === 'code').map(w => ({
  id: w.model.id, count: w.model.executionCount,
  errors: w.model.outputs.toJSON().filter(o => o.output_type === 'error').map(o => o.ename + ': ' + o.evalue)}))"""
# Colours as painted: the first opaque background behind an element, and the contrast of its text by WCAG.
SEEN = """(async () => {
  const content = jupyterapp.shell.currentWidget.content;
  const index = content.widgets.findIndex(w => w.model.id === %s);
  await content.scrollToItem(index, 'start');
  await new Promise(done => setTimeout(done, 600));
  const area = content.widgets[index].outputArea.node;
  const node = [...area.querySelectorAll(%s)].find(n => n.getBoundingClientRect().height > 0);
  if (!node) return {found: false, html: area.innerText.slice(0, 300)};
  node.scrollIntoView({block: 'center'});
  await new Promise(done => setTimeout(done, 300));
  const box = node.getBoundingClientRect();
  const at = document.elementFromPoint(box.x + Math.min(box.width / 2, 200), box.y + Math.min(box.height / 2, 20));
  const parts = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => { const [r, g, b] = parts(c).map(v => v / 255).map(v => v <= .03928 ? v / 12.92
    : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  let behind = at || node, paper = 'rgb(255, 255, 255)';
  while (behind) { const c = getComputedStyle(behind).backgroundColor, p = parts(c);
    if (p.length < 4 || p[3] > 0) { paper = c; break; } behind = behind.parentElement; }
  const [a, b] = [light(getComputedStyle(at || node).color), light(paper)];
  return {found: true, width: box.width, height: box.height, natural: node.naturalWidth || 0,
    inside: !!at && (node === at || node.contains(at) || at.contains(node)), text: node.innerText || '',
    contrast: (Math.max(a, b) + .05) / (Math.min(a, b) + .05), paper: b};
})()"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Copies of the notebooks with a tiny model as parameters."""
    work = tmp_path_factory.mktemp("lab")
    model = save_tiny(work / "tiny", layers=4)
    (work / "books").mkdir()
    for name, (small, _, _) in BOOKS.items():
        given = {"model": str(model), **small} | ({"out": str(work / "runs")} if "families" in small else {})
        notebook = load_notebook_node(str(ROOT / "notebooks" / f"{name}.ipynb"))
        nbformat.write(parameterize_notebook(notebook, given, report_mode=False), work / "books" / f"{name}.ipynb")
    return work


@pytest.fixture
def artefacts():
    return Path(os.environ.get("KVLAB_ARTEFACTS") or ROOT / "runs" / "browser")


@pytest.fixture(scope="module")
def server(folder):
    more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "KVLAB_CACHE": str(folder / "cache")}
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # kernels inherit it and would stop capturing what is printed
    with lab.Server.start(folder / "books", folder, more) as started:
        yield started


@pytest.mark.parametrize("name", BOOKS)
def test_a_person_sees_figure_and_cache_in_both_themes(name, server, tmp_path, artefacts):
    asyncio.run(look(name, server, tmp_path, artefacts))


async def look(name, server, work, artefacts):
    _, figure, cache = BOOKS[name]
    async with lab.Page.open(server.page(f"{name}.ipynb"), work) as page:
        await page.until(READY % json.dumps(f"{name}.ipynb"))
        await page.run(RUN)
        cells = await page.run(CELLS)
        assert len(cells) > 5
        assert [(c["id"], c["errors"]) for c in cells if c["errors"]] == []
        assert [c["id"] for c in cells if c["count"] is None] == []
        paper = {}
        for theme, full_name in THEMES.items():
            await page.run(f"jupyterapp.commands.execute('apputils:change-theme', {{theme: '{full_name}'}})")
            await page.until(f"document.body.dataset.jpThemeLight === '{str(theme == 'light').lower()}'")
            drawn = await page.run(SEEN % (json.dumps(figure), json.dumps("img")))
            await page.picture(artefacts / f"{name}-{theme}-figure.png")
            assert drawn["found"], drawn
            assert drawn["natural"] > 300
            assert min(drawn["width"], drawn["height"]) > 100
            assert drawn["inside"], "something lies over the figure"
            shown = await page.run(SEEN % (json.dumps(cache), json.dumps(".jp-RenderedHTMLCommon > div")))
            await page.picture(artefacts / f"{name}-{theme}-cache.png")
            assert shown["found"], shown
            assert min(shown["width"], shown["height"]) > 60
            assert shown["inside"], "something lies over the cache"
            assert "bytes" in shown["text"]
            assert shown["contrast"] >= 4.5, "text that cannot be read"
            paper[theme] = shown["paper"]
        assert paper["light"] > 0.8 > 0.2 > paper["dark"], paper


def test_a_control_replaces_the_picture_in_place(folder, server, tmp_path, artefacts):
    cell = nbformat.v4.new_code_cell(BROWSED)
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=about), folder / "books" / "browse.ipynb")
    asyncio.run(move(server, tmp_path, artefacts))


async def move(server, work, artefacts):
    async with lab.Page.open(server.page("browse.ipynb"), work) as page:
        await page.until(READY % json.dumps("browse.ipynb"))
        await page.run(RUN)
        (narrow,) = await page.until(f"(w => w.length === 1 && w[0] > 0 ? w : null)({IMAGES})")
        await page.until(HANDLE)
        for kind in ("keyDown", "keyUp"):
            key = {"key": "ArrowRight", "code": "ArrowRight", "windowsVirtualKeyCode": 39}
            await page.send("Input.dispatchKeyEvent", type=kind, **key)
        (wide,) = await page.until(f"(w => w.length === 1 && w[0] > {1.3 * narrow} ? w : null)({IMAGES})")
        await page.picture(artefacts / "browse.png")
        assert wide == pytest.approx(narrow * 8 / 5, rel=0.02)
        # what a notebook saved now would show without a kernel: the picture last looked at, as PNG with words
        saved = await page.run("jupyterapp.shell.currentWidget.content.widgets[0].model.outputs.toJSON()")
        assert [o["metadata"]["image/png"]["alt"] for o in saved if "image/png" in o["data"]] == [
            "a figure 8.0 inches wide, for the test of controls"
        ]
