"""How an image is cut into tiles, and the text that stands for it in a prompt: pure functions of its size.

Idefics 3 and SmolVLM (arXiv 2408.12637, 2504.05299): an image is brought to `longest_edge`, then to whole tiles; each
tile is a picture of its own, and behind them comes the whole image in one tile. An image of one tile is only that.
Sizes are rounded as transformers' `Idefics3ImageProcessor` and `SmolVLMImageProcessor` do it.

Pixtral (arXiv 2410.07073): an image is one picture of whole patches in its own proportions, no larger than
`longest_edge`; each row of patches ends with a mark. Mistral 3.1 does so with squares of patches.

Qwen2.5-VL and Qwen3-VL (arXiv 2502.13923, 2511.21631): one picture of whole squares of patches, with as many pixels as
the model allows; no marks. Sizes are rounded as in `smart_resize` of transformers' `Qwen2VLImageProcessor`.
"""

from dataclasses import dataclass
from math import ceil, floor, sqrt

from shared.images.refs import Detail, VisionSpec

MOST_PIXELS = 4096  # on a side, whatever the model asks for
FAKE = "<fake_token_around_image>"
WHOLE = "<global-img>"
ROW_END, IMAGE_END = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True)
class Layout:
    """Of one image. Without rows and columns it is one tile."""

    text: str  # that takes the place of its mark in the prompt
    tokens: int
    resized: tuple[int, int]  # width and height after the first step
    whole: tuple[int, int]  # width and height in whole tiles
    last: tuple[int, int]  # width and height of the last picture, which is the whole image
    rows: int = 0
    columns: int = 0

    @property
    def tiles(self) -> int:
        """Pictures that the tower sees."""
        return self.rows * self.columns + 1


def layout(vision: VisionSpec, width: int, height: int, detail: Detail) -> Layout:
    """What an image of so many pixels comes to; `low` is one tile, or a quarter of what each side may have."""
    if vision.family == "qwen":
        return _in_squares(vision, width, height, vision.most_pixels // (16 if detail == "low" else 1))
    if vision.family == "pixtral":
        return _in_patches(vision, width, height, vision.longest_edge // (4 if detail == "low" else 1))
    tile = vision.tile
    resized = _resized(width, height, vision.longest_edge)
    if not vision.splits or detail == "low":
        return Layout(_single(vision), vision.tile_tokens, resized, (tile, tile), (tile, tile))
    whole = _in_tiles(*resized, tile)
    if max(whole) <= tile:
        return Layout(_single(vision), vision.tile_tokens, resized, whole, (tile, tile))
    columns, rows = whole[0] // tile, whole[1] // tile
    tokens = (rows * columns + 1) * vision.tile_tokens
    return Layout(_split(vision, rows, columns), tokens, resized, whole, (tile, tile), rows, columns)


def _in_patches(vision: VisionSpec, width: int, height: int, longest: int) -> Layout:
    ratio = max(width / longest, height / longest)
    if ratio > 1:
        width, height = int(width / ratio), int(height / ratio)
    columns, rows = (max(1, side - 1 + vision.tile) // vision.tile for side in (width, height))
    columns, rows = max(1, columns), max(1, rows)
    size = columns * vision.tile, rows * vision.tile
    text = ROW_END.join([vision.image_token * columns] * rows) + IMAGE_END
    return Layout(text, rows * columns, size, size, size)


def _in_squares(vision: VisionSpec, width: int, height: int, most: int) -> Layout:
    tile, fewest = vision.tile, vision.fewest_pixels
    most = max(most, fewest, tile * tile)
    columns, rows = round(width / tile), round(height / tile)
    if columns * rows * tile * tile > most:
        ratio = sqrt(width * height / most)
        columns, rows = (max(1, floor(side / ratio / tile)) for side in (width, height))
    elif columns * rows * tile * tile < fewest:
        ratio = sqrt(fewest / (width * height))
        columns, rows = (ceil(side * ratio / tile) for side in (width, height))
    columns, rows = max(1, columns), max(1, rows)
    size = columns * tile, rows * tile
    return Layout(vision.image_token * (rows * columns), rows * columns, size, size, size)


def _resized(width: int, height: int, longest: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > MOST_PIXELS:
        width, height = MOST_PIXELS, int(MOST_PIXELS / ratio)
    elif height > width and height > MOST_PIXELS:
        width, height = int(MOST_PIXELS * ratio), MOST_PIXELS
    return max(width, 1), max(height, 1)


def _in_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height:
        width = ceil(width / tile) * tile
        height = ceil(max(1, int(width / ratio)) / tile) * tile
    else:
        height = ceil(height / tile) * tile
        width = ceil(max(1, int(height * ratio)) / tile) * tile
    return width, height


def _single(vision: VisionSpec) -> str:
    return f"{FAKE}{WHOLE}{vision.image_token * vision.tile_tokens}{FAKE}"


def _split(vision: VisionSpec, rows: int, columns: int) -> str:
    marks = vision.image_token * vision.tile_tokens
    lines = (
        "".join(f"{FAKE}<row_{row + 1}_col_{column + 1}>{marks}" for column in range(columns)) for row in range(rows)
    )
    return "\n".join(lines) + f"\n\n{FAKE}{WHOLE}{marks}{FAKE}"
