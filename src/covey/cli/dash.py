"""covey dash and covey report: runs on a page, live in a browser or as one file."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path

from covey.cli.words import parse
from covey.errors import InputError

DASH = """\
covey dash [RUNS...] [--port 8765] [--open]

  A page over one or many runs, live while they are going: curves, comparison, episodes token by token, rewards, and
  what looks wrong. For this machine alone: open the printed link, which carries a token. Ctrl-C ends it.
  RUNS           run folders (outputs/DATE/TIME), or folders that hold some; without any: outputs
  --port 8765    without it any free one
  --open         open a browser too

  On another machine:  ssh -L 8765:localhost:8765 MACHINE    and there:  covey dash --port 8765
"""
REPORT = """\
covey report RUN... [--out FILE] [--episodes 200] [--markdown]

  The page of covey dash as one HTML file, which needs neither a server nor a network; or Markdown for a pull request.
  --out FILE        without it RUN/report.html; Markdown is printed
  --episodes 200    how many episodes are put into the file, in whole groups over the whole run
"""


def main_dash(argv: list[str]) -> int:
    words = parse(argv, switches=("--open",), values=("--port",))
    if words.help:
        print(DASH)
        return 0
    from covey.dash.runs import Library
    from covey.dash.server import Dash

    places = [Path(place) for place in words.places] or [Path("outputs")]
    library = Library(places)
    library.poll()  # the table is there before the link is
    if len(library.runs) == 1:
        library.runs[0].open()  # the first page shows its numbers
    port = _whole(words.text("--port") or "0", "--port")
    try:
        dash = Dash(library, port)
    except OSError as error:
        raise InputError(f"--port {port}: {error.strerror}\n  fix: name another, or none") from error
    with dash:
        count = len(library.runs)
        print(f"{count} run{'s' if count != 1 else ''}\n{dash.link}\nCtrl-C ends it.", flush=True)
        if words.on("--open"):
            webbrowser.open(dash.link)
        dash.wait()
    return 0


def main_report(argv: list[str]) -> int:
    words = parse(argv, switches=("--markdown",), values=("--out", "--episodes"))
    if words.help:
        print(REPORT)
        return 0
    if not words.places:
        raise InputError(f"name a run\n\n{REPORT.rstrip()}")
    from covey.dash.report import EPISODES, html_report, markdown_report

    places = [Path(place) for place in words.places]
    out = words.text("--out")
    if words.on("--markdown"):
        text = "\n".join(markdown_report(place) for place in places)
        if out is None:
            print(text, end="")
            return 0
    else:
        most = _whole(words.text("--episodes") or str(EPISODES), "--episodes")
        text = html_report(places, most)
    path = Path(out) if out is not None else places[0] / "report.html"
    path.write_text(text, encoding="utf-8")
    print(f"{path}  {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    return 0


def _whole(text: str, flag: str) -> int:
    if not text.isdigit():
        raise InputError(f"{flag} wants a whole number, not {text!r}")
    return int(text)
