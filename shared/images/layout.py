"""How an image is cut into tiles, and the text that stands for it in a prompt: pure functions of its size.

Idefics 3 and SmolVLM (arXiv 2408.12637, 2504.05299): an image is brought to `longest_edge`, then to whole tiles; each
tile is a picture of its own, and behind them comes the whole image in one tile. An image of one tile is only that.
Sizes are rounded as transformers' `Idefics3ImageProcessor` and `SmolVLMImageProcessor` do it.

Pixtral (arXiv 2410.07073): an image is one picture of whole patches in its own proportions, no larger than
`longest_edge`; each row of patches ends with a mark. Mistral 3.1 does so with squares of patches.

Qwen2.5-VL and Qwen3-VL (arXiv 2502.13923, 2511.21631): one picture of whole squares of patches, with as many pixels as
the model allows; no marks. Sizes are rounded as in `smart_resize` of transformers' `Qwen2VLImageProcessor`.

LFM2-VL (arXiv 2511.23404): a small image is one picture of whole squares of patches; a larger one is cut into 2 to 10
tiles, in the grid that is nearest to its proportions, and behind them comes the whole image as a small one would be.
Sizes and grids are those of transformers' `Lfm2VlImageProcessor`.

Gemma 3 (arXiv 2503.19786): an image is one square picture of a fixed size, whatever its proportions.
"""

from dataclasses import dataclass
from math import ceil, floor, inf, sqrt

from shared.images.refs import Detail, VisionSpec

MOST_PIXELS = 4096  # on a side, whatever the model asks for
FAKE = "<fake_token_around_image>"
WHOLE = "<global-img>"
ROW_END, IMAGE_END = "[IMG_BREAK]", "[IMG_END]"
SOFT, SOFT_END = "<image_soft_token>", "<end_of_image>"
VIEWS, THUMBNAIL, VIEWS_END = "<|image_start|>", "<|img_thumbnail|>", "<|image_end|>"
FEWEST_TILES, MOST_TILES = 2, 10  # of LFM2-VL, whatever its files contain: some were made for processors without tiles


@dataclass(frozen=True)
class Layout:
    """How one image is resized and cut into tiles; without rows and columns it is one tile."""

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
    """Layout of an image of this size; detail `low` gives one tile, or for some families a quarter of each side's
    limit.
    """
    if vision.family == "gemma3":
        text = f"\n\n{vision.image_token}{SOFT * vision.tile_tokens}{SOFT_END}\n\n"
        square = vision.tile, vision.tile
        return Layout(text, vision.tile_tokens, square, square, square)
    if vision.family == "lfm2":
        return _in_views(vision, width, height, detail)
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
    rough = round(width / tile), round(height / tile)
    columns, rows = _squares(width, height, tile, rough, fewest, max(most, fewest, tile * tile))
    size = columns * tile, rows * tile
    return Layout(vision.image_token * (rows * columns), rows * columns, size, size, size)


def _squares(width: int, height: int, side: int, rough: tuple[int, int], fewest: int, most: int) -> tuple[int, int]:
    """How many of them go across and down; `rough`: by rounding."""
    columns, rows = rough
    if columns * rows * side * side > most:
        ratio = sqrt(width * height / most)
        columns, rows = (floor(each / ratio / side) for each in (width, height))
    elif columns * rows * side * side < fewest:
        ratio = sqrt(fewest / (width * height))
        columns, rows = (ceil(each * ratio / side) for each in (width, height))
    return max(1, columns), max(1, rows)


def _in_views(vision: VisionSpec, width: int, height: int, detail: Detail) -> Layout:
    side, tile, most = vision.vector_side, vision.tile, vision.most_pixels
    rough = max(1, round(width / side)), max(1, round(height / side))
    columns, rows = _squares(width, height, side, rough, vision.fewest_pixels, most)
    seen, marks = (columns * side, rows * side), vision.image_token * (columns * rows)
    # The official rule counts half a square at least, not one: no image that we take is so large and so thin.
    if detail == "low" or rough[0] * rough[1] * side * side <= most * vision.tolerance:
        return Layout(f"{VIEWS}{marks}{VIEWS_END}", columns * rows, seen, seen, seen)
    across, down = _grid(width, height, tile)
    tiles = "".join(
        f"<|img_row_{row + 1}_col_{column + 1}|>{vision.image_token * vision.tile_tokens}"
        for row in range(down)
        for column in range(across)
    )
    text = f"{VIEWS}{tiles}{THUMBNAIL}{marks}{VIEWS_END}"
    tokens = across * down * vision.tile_tokens + columns * rows
    return Layout(text, tokens, (width, height), (across * tile, down * tile), seen, down, across)


def _grid(width: int, height: int, tile: int) -> tuple[int, int]:
    """Columns and rows of tiles: of grids that are as near to the proportions, a larger one for a larger image."""
    grids = [
        (across, count // across)
        for count in range(FEWEST_TILES, MOST_TILES + 1)
        for across in range(1, count + 1)
        if count % across == 0
    ]
    nearest, best = inf, grids[0]
    for across, down in grids:
        off = abs(width / height - across / down)
        if off < nearest or (off == nearest and width * height > 0.5 * tile * tile * across * down):
            nearest, best = off, (across, down)
    return best


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
