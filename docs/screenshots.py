"""Pictures of pages as readers see them, with Chromium: `python -m docs.screenshots FOLDER PAGE...`.

Each page (an HTML file of the site of `make docs`, or `report.html` of a run) is shot in light and dark, 390 and 1280
pixels wide, as FOLDER/PAGE-WIDTH-SCHEME.png. Debian has Chromium: `apt-get install chromium`.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTHS = (390, 1280)
SCHEMES = {"dark": 0, "light": 1}  # Chromium's numbers of preferredColorScheme
HEIGHT = 1400


def main(arguments: list[str]) -> None:
    """Shoot the pages."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if len(arguments) < 2 or chromium is None:
        sys.exit(
            "usage: python -m docs.screenshots FOLDER PAGE..., with Chromium on the path (`apt-get install chromium`)"
        )
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for page in map(Path, arguments[1:]):
        for width in WIDTHS:
            for scheme in SCHEMES:
                _shoot(chromium, page.resolve(), width, scheme, folder / f"{page.stem}-{width}-{scheme}.png")


def _shoot(chromium: str, page: Path, width: int, scheme: str, picture: Path) -> None:
    """Shoot a page in a frame: a window of Chromium is 500 pixels wide at least."""
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        style = f"border: 0; width: {width}px; height: {HEIGHT}px"
        frame.write_text(f'<body style="margin: 0"><iframe src="{page.as_uri()}" style="{style}"></iframe>')
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]
        options += [f"--user-data-dir={folder}", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
        options += [f"--window-size={max(width, 500)},{HEIGHT}", f"--screenshot={picture.resolve()}"]
        subprocess.run([chromium, *options, frame.as_uri()], check=True, capture_output=True, timeout=120)
    if not picture.is_file():
        sys.exit(f"Chromium wrote no {picture} of {page}. Look at the page in a browser.")


if __name__ == "__main__":
    main(sys.argv[1:])
