"""Draw the prompts of a file with the embedded model and put the pictures on one sheet, each above its prompt::

    python ChituBench/scripts/contact_sheet.py

Every picture is the first one drawn, from seed 0; none is chosen.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from chitu_diffusion.runtime import DiffusionTask, Generator
from chitu_diffusion.runtime.generator import with_defaults

BENCH = Path(__file__).resolve().parent.parent
CELL, MARGIN, CAPTION = 256, 12, 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, default=BENCH / "prompts" / "contact_sheet.txt")
    parser.add_argument("--output", type=Path, default=BENCH / "plots" / "contact_sheet.png")
    parser.add_argument("--columns", type=int, default=4)
    options = parser.parse_args()
    prompts = options.prompts.read_text().splitlines()
    task = with_defaults(DiffusionTask(prompts=tuple(prompts)))
    with Generator.load(task) as generator:
        items = generator.generate(task).items
    sheet([item.frames[0] for item in items], prompts, options.columns).save(options.output, optimize=True)


def sheet(pictures: list[Image.Image], captions: list[str], columns: int) -> Image.Image:
    """The pictures in rows of `columns`, 256 pixels each."""
    rows = -(-len(pictures) // columns)
    size = (columns * (CELL + MARGIN) + MARGIN, rows * (CELL + CAPTION + MARGIN) + MARGIN)
    page = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size=17)
    for place, (picture, caption) in enumerate(zip(pictures, captions)):
        left = MARGIN + place % columns * (CELL + MARGIN)
        top = MARGIN + place // columns * (CELL + CAPTION + MARGIN)
        page.paste(picture, (left, top))
        draw.rectangle((left, top, left + CELL - 1, top + CELL - 1), outline=(200, 200, 200))
        draw.text((left, top + CELL + 4), textwrap.fill(caption, 30), fill="black", font=font)
    return page


if __name__ == "__main__":
    main()
