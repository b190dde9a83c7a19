"""Images as they are read: what a person sees, and what transformers' processors make of them by themselves."""

import io

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image
from transformers.image_transforms import convert_to_rgb

from tiny_vision import drawn_image
from upweight.image_files import as_rgb, open_image

DRAWN = drawn_image(3, 60, 44)
CLEAR = Image.fromarray(np.random.default_rng(1).integers(0, 255, (44, 60, 4), np.uint8))


def written(image, kind="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


FILES = {
    "rgb": written(DRAWN),
    "transparent": written(CLEAR),
    "grey and transparent": written(CLEAR.convert("LA")),
    "palette": written(DRAWN.quantize(16)),
    "transparent palette": written(DRAWN.quantize(16), transparency=3),
    "one transparent colour": written(DRAWN, transparency=DRAWN.getpixel((0, 0))),
    "grey": written(DRAWN.convert("L")),
    "black and white": written(DRAWN.convert("1")),
    "CMYK": written(DRAWN.convert("CMYK"), "JPEG"),
    "animated": written(DRAWN, "GIF", save_all=True, append_images=[drawn_image(4, 60, 44)]),
    "BMP": written(DRAWN, "BMP"),
    "one pixel": written(drawn_image(0, 1, 1)),
}


@pytest.mark.parametrize("name", FILES)
def test_images_are_those_of_transformers(name):
    with Image.open(io.BytesIO(FILES[name])) as image:
        right = convert_to_rgb(image, return_numpy=True)
    for ours in (open_image(FILES[name]), as_rgb(Image.open(io.BytesIO(FILES[name])))):
        assert ours.mode == "RGB"
        assert np.array_equal(np.asarray(ours), right)


def test_transparency_is_white():
    clear = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    clear.putpixel((1, 0), (10, 20, 30, 255))
    assert list(np.asarray(open_image(written(clear)))[0].tolist()) == [[255, 255, 255], [10, 20, 30]]


def test_photos_are_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6
    file = written(DRAWN, exif=exif)
    assert np.array_equal(np.asarray(open_image(file)), np.rot90(np.asarray(DRAWN), -1))


def test_sixteen_bits_of_grey_keep_their_shades():
    shades = np.array([[0, 257, 32896, 65535]], np.uint16)
    assert np.asarray(open_image(written(Image.fromarray(shades))))[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no image format"),
        (b"\x89PNG broken", "no image format"),
        (written(DRAWN, "JPEG")[:-200], "truncated"),
        (written(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), r"mode F.*save it with 8 bits"),
    ],
)
def test_broken_images_are_described(content, message):
    with pytest.raises(ValueError, match=message) as error:
        open_image(content)
    assert "0x" not in str(error.value)
