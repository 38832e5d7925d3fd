"""Questions to an image file: whether it is one that we take, and the tiles that a model sees of it.

The format is told by the content, never by a name or a content type. The pixels are counted before any of them is
decoded, so that a file of a few bytes that says it is huge costs nothing.
"""

import io
import warnings
from typing import NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from shared.errors import InvalidRequestError
from shared.images.layout import layout
from shared.images.refs import Detail, VisionSpec

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MOST_PIXELS = 40_000_000
LONGEST_SIDE = 16_384
MOST_RATIO = 100  # of the longer side to the shorter one: beyond that an image is a line


class ImageSize(NamedTuple):
    """Width and height in pixels, after the rotation that the image file asks for."""

    width: int
    height: int


def checked(data: bytes) -> ImageSize:
    """The size of an image that can be decoded whole; InvalidRequestError states what is wrong with another one."""
    image = _decoded(data)
    return ImageSize(*image.size)


class Tiles(NamedTuple):
    """The tiles of an image as the model receives them."""

    width: int  # of the last one, in pixels; those before it are squares of `VisionSpec.tile`
    height: int
    pictures: list[bytes]  # RGB bytes [height, width, 3]


def tiles(data: bytes, vision: VisionSpec, detail: Detail) -> Tiles:
    """The tiles of an image, the whole of it last; errors as in `checked`."""
    image = _decoded(data)
    cut, tile, filter_ = layout(vision, *image.size, detail), vision.tile, Image.Resampling(vision.resample)
    if cut.resized != image.size:
        image = image.resize(cut.resized, filter_)
    whole = image.resize(cut.whole, filter_)
    boxes = [
        (column * tile, row * tile, (column + 1) * tile, (row + 1) * tile)
        for row in range(cut.rows)
        for column in range(cut.columns)
    ]
    found = [whole.crop(box).tobytes() for box in boxes]
    last = (image if vision.family == "lfm2" else whole).resize(cut.last, filter_)
    return Tiles(*cut.last, [*found, last.tobytes()])


def thumbnail(data: bytes, side: int) -> bytes:
    """A PNG of the image, at most so many pixels on a side; errors as in `checked`."""
    image, file = _decoded(data), io.BytesIO()
    image.thumbnail((side, side))
    image.save(file, "PNG")
    return file.getvalue()


def _decoded(data: bytes) -> Image.Image:
    """In RGB; what is transparent is shown on white."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_size(image)
            if getattr(image, "n_frames", 1) > 1:
                raise InvalidRequestError("the image is animated, and one with a single frame is needed")
            image.load()
            image = ImageOps.exif_transpose(image)
            return _on_white(_of_16_bits(image) if image.mode.startswith("I") else image)
    except (InvalidRequestError, MemoryError):
        raise
    except UnidentifiedImageError:
        known = ", ".join(each.lower() for each in FORMATS)
        raise InvalidRequestError(f"the bytes are no image of a kind that this server reads ({known})") from None
    except Image.DecompressionBombError:
        raise InvalidRequestError(f"the image has more than {MOST_PIXELS} pixels") from None
    except Exception as error:  # whatever a decoder raises of bytes that it cannot read
        raise InvalidRequestError(
            f"the image cannot be decoded: it is truncated or damaged ({_words(error)})"
        ) from None


def _check_size(image: Image.Image) -> None:
    width, height = image.size
    if width * height > MOST_PIXELS or max(width, height) > LONGEST_SIDE:
        raise InvalidRequestError(
            f"the image has {width} x {height} pixels; {MOST_PIXELS} in all and {LONGEST_SIDE} on a side are the limit"
        )
    if max(width, height) > MOST_RATIO * min(width, height):
        raise InvalidRequestError(
            f"the image has {width} x {height} pixels: one side is more than {MOST_RATIO} times the other"
        )


def _of_16_bits(image: Image.Image) -> Image.Image:
    """Grey in 8 bits: the upper ones, as Pillow reads colours of 16; its own `convert` shows all above 255 as white."""
    grey = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    grey.info.pop("transparency", None)  # a shade among 65,536
    return grey


def _on_white(image: Image.Image) -> Image.Image:
    if "transparency" not in image.info and "A" not in image.getbands() and "a" not in image.getbands():
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200].encode(errors="replace").decode()
