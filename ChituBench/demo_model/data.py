"""Scenes of emoji: the object names, their pictures, and where they stand.

The pictures come from the Noto Color Emoji font (SIL Open Font License 1.1). A scene holds one object in the middle or
two objects in the two halves of a 256 x 256 picture with a plain background. Objects move in steps of 8 pixels, which is
one cell of the VAE's latent grid: a moved object then has a moved copy of the same latents, and the small transformer
need not spend its weights on learning what sub-cell shifts look like.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

HERE = Path(__file__).parent
FONT = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"  # Debian package fonts-noto-color-emoji
SIZE = 256  # picture side in pixels
STEP = 8  # objects move by whole latent cells
SINGLE = 176  # side of a lone object
PAIR = 112  # side of each of two objects: with 8 pixels of room on both sides it fills a half exactly
GLYPH = 136  # side of the font's bitmaps, padded to a square

COLORS = {
    "white": (255, 255, 255),
    "black": (24, 24, 28),
    "gray": (150, 152, 156),
    "red": (222, 60, 60),
    "orange": (245, 150, 50),
    "yellow": (250, 218, 90),
    "green": (90, 180, 100),
    "blue": (70, 130, 225),
    "purple": (145, 95, 205),
    "pink": (248, 170, 195),
    "brown": (140, 95, 65),
    "cyan": (110, 210, 220),
}
COLOR_NAMES = list(COLORS)

# Short natural names for pictures whose Unicode name is not what anybody would type.
UNICODE_NAMES = {
    "eggplant": "aubergine",
    "pizza slice": "slice of pizza",
    "traffic light": "vertical traffic light",
    "drum": "drum with drumsticks",
    "telephone": "black telephone",
    "light bulb": "electric light bulb",
    "scissors": "black scissors",
    "paintbrush": "lower left paintbrush",
    "magnifying glass": "left-pointing magnifying glass",
    "basketball": "basketball and hoop",
    "house": "house building",
    "castle": "european castle",
    "snowman": "snowman without snow",
    "earth": "earth globe europe-africa",
    "alien": "extraterrestrial alien",
    "red heart": "heavy black heart",
}

SINGLE_SCENE, LEFT_OF, ABOVE = 0, 1, 2


def load_names(path: Path = HERE / "names.txt") -> list[str]:
    """The object names, one a line."""
    return path.read_text().split("\n")[:-1]


def render_sprites(names: list[str], font: str = FONT) -> np.ndarray:
    """Draw every object once. Returns uint8 (names, 136, 136, 4), straight alpha."""
    from PIL import Image, ImageDraw, ImageFont

    face = ImageFont.truetype(font, 109)  # the only size that the font's bitmaps have
    sprites = np.zeros((len(names), GLYPH, GLYPH, 4), np.uint8)
    for row, name in enumerate(names):
        char = unicodedata.lookup(UNICODE_NAMES.get(name, name).upper())
        picture = Image.new("RGBA", (GLYPH, GLYPH), (0, 0, 0, 0))
        ImageDraw.Draw(picture).text((0, 4), char, font=face, embedded_color=True, anchor="lt")
        sprites[row] = np.asarray(picture)
    return sprites


def load_sprites(names: list[str], cache: str | None = None) -> np.ndarray:
    """Sprites from a cache file if one is given (for machines without the font), else from the font."""
    if cache is None:
        return render_sprites(names)
    stored = np.load(cache)
    rows = {name: row for row, name in enumerate(stored["names"].tolist())}
    return stored["sprites"][[rows[name] for name in names]]


@dataclass
class Scenes:
    """A batch of scenes as columns of one length. Corners are the objects' top left pixels; `second` is -1 if unused."""

    layout: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    color: torch.Tensor
    corners: torch.Tensor  # (scenes, 2 objects, 2: y x)

    def __len__(self) -> int:
        return len(self.layout)

    def __getitem__(self, index) -> Scenes:
        return Scenes(*(column[index] for column in vars(self).values()))

    @staticmethod
    def join(parts: list[Scenes]) -> Scenes:
        return Scenes(*(torch.cat(columns) for columns in zip(*(vars(part).values() for part in parts))))


def canonical_corners(layout: torch.Tensor) -> torch.Tensor:
    """Corners of centred objects for every layout, (scenes, 2, 2)."""
    middle, low, high = (SIZE - PAIR) // 2, SIZE // 4 - PAIR // 2, 3 * SIZE // 4 - PAIR // 2
    lone = (SIZE - SINGLE) // 2
    table = torch.tensor([[[lone, lone], [0, 0]], [[middle, low], [middle, high]], [[low, middle], [high, middle]]])
    return table[layout]


def make_scenes(layout, first, second, color, generator: torch.Generator | None = None) -> Scenes:
    """Scenes with centred objects, or moved by up to one step in each direction if a generator is given."""
    corners = canonical_corners(layout)
    if generator is not None:
        corners = corners + STEP * torch.randint(-1, 2, corners.shape, generator=generator)
    return Scenes(layout, first, torch.where(layout == SINGLE_SCENE, -1, second), color, corners)


def all_singles(objects: int) -> Scenes:
    """Every lone object on every background at every one of the nine places."""
    grid = torch.cartesian_prod(
        torch.arange(objects), torch.arange(len(COLORS)), torch.arange(-1, 2), torch.arange(-1, 2)
    )
    zeros = torch.zeros(len(grid), dtype=torch.long)
    scenes = make_scenes(zeros, grid[:, 0], zeros, grid[:, 1])
    scenes.corners[:, 0] += STEP * grid[:, 2:]
    return scenes


def random_pairs(count: int, objects: int, generator: torch.Generator) -> Scenes:
    """Two different objects side by side or one above the other."""
    first = torch.randint(objects, (count,), generator=generator)
    second = (first + torch.randint(1, objects, (count,), generator=generator)) % objects
    layout = torch.randint(LEFT_OF, ABOVE + 1, (count,), generator=generator)
    return make_scenes(layout, first, second, torch.randint(len(COLORS), (count,), generator=generator), generator)


class Painter:
    """Composes scenes on a device from sprites that are kept there, premultiplied, at both object sizes."""

    def __init__(self, sprites: np.ndarray, device: torch.device | str):
        rgba = torch.from_numpy(sprites).to(device).permute(0, 3, 1, 2).float() / 255
        rgba = torch.cat([rgba[:, :3] * rgba[:, 3:], rgba[:, 3:]], 1)  # resizing straight alpha would darken edges
        self.sprites = {}
        for side in (SINGLE, PAIR):
            resized = F.interpolate(rgba, (side, side), mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
            self.sprites[side] = resized.permute(0, 2, 3, 1).contiguous()
        self.palette = torch.tensor(list(COLORS.values()), device=device).float() / 255
        self.device = torch.device(device)

    def _paste(self, canvas, rows, objects, corners, side):
        if len(rows) == 0:
            return
        span = torch.arange(side, device=self.device)
        y = (corners[:, 0:1] + span)[:, :, None]
        x = (corners[:, 1:2] + span)[:, None, :]
        sprite = self.sprites[side][objects]
        where = (rows[:, None, None], y, x)
        canvas[where] = canvas[where] * (1 - sprite[..., 3:]) + sprite[..., :3]

    def paint(self, scenes: Scenes, backgrounds: torch.Tensor | None = None) -> torch.Tensor:
        """Pictures (scenes, 3, 256, 256) in -1..1. `backgrounds` (scenes, 3) in 0..1 overrides the named colours."""
        scenes = Scenes(*(column.to(self.device) for column in vars(scenes).values()))
        fill = self.palette[scenes.color] if backgrounds is None else backgrounds
        canvas = fill[:, None, None, :].expand(-1, SIZE, SIZE, -1).clone()
        lone = (scenes.layout == SINGLE_SCENE).nonzero()[:, 0]
        both = (scenes.layout != SINGLE_SCENE).nonzero()[:, 0]
        self._paste(canvas, lone, scenes.first[lone], scenes.corners[lone, 0], SINGLE)
        self._paste(canvas, both, scenes.first[both], scenes.corners[both, 0], PAIR)
        self._paste(canvas, both, scenes.second[both], scenes.corners[both, 1], PAIR)
        return canvas.permute(0, 3, 1, 2) * 2 - 1
