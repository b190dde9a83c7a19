"""Pictures for the starters with images, drawn without a library: squares of one colour, to be counted; their rows."""

import json
import random
import struct
import zlib

SIDE, CELL = 96, 24  # pixels of a picture, and of the cells that squares lie in
WORDS = ("one", "two", "three", "four")  # of the counts
QUESTION = "How many squares are there?"
FOLDER = "pictures"  # of a starter
PICTURES = 160  # so many that even a tiny model which starts at random learns to count, not each picture by heart
GROUND: tuple[int, int, int] = (245, 245, 240)
COLOURS = ((200, 40, 40), (40, 90, 200), (30, 140, 60), (90, 40, 130))


def count_of(number: int) -> int:
    """Return how many squares the picture of a number shows."""
    return number % len(WORDS) + 1


def name_of(number: int) -> str:
    """Return the name of the file of a picture in its starter."""
    return f"{FOLDER}/{number:03d}.png"


def picture_rows(*, rewarded: bool) -> str:
    """Return the rows of a starter as JSON lines: questions with answers, or with a column that a reward reads."""
    lines = []
    for number in range(PICTURES):
        answer, asked = WORDS[count_of(number) - 1], {"role": "user", "content": QUESTION}
        row = {"prompt": [asked], "answer": answer}
        if not rewarded:
            row = {"messages": [asked, {"role": "assistant", "content": answer}]}
        lines.append(json.dumps({"images": [name_of(number)], **row}))
    return "\n".join(lines) + "\n"


def picture(number: int) -> bytes:
    """Return a PNG file; each number has a picture of its own."""
    rng = random.Random(number)
    colour = rng.choice(COLOURS)
    pixels = [[GROUND] * SIDE for _ in range(SIDE)]
    cells = [(left, top) for left in range(0, SIDE, CELL) for top in range(0, SIDE, CELL)]
    for left, top in rng.sample(cells, count_of(number)):
        edge = rng.randint(2, 5)
        for y in range(top + edge, top + CELL - edge):
            pixels[y][left + edge : left + CELL - edge] = [colour] * (CELL - 2 * edge)
    # A line of a PNG begins with its filter, here none.
    lines = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in pixels)
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)  # 8 bits of each of three colours
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
