"""Small pictures: figures of 5 shapes and 6 colours in the quadrants of 48 x 48 pixels."""

import numpy as np

SIZE = 48
RGB = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 80, 230), "yellow": (235, 215, 50),
       "white": (245, 245, 245), "purple": (160, 50, 190)}
_Y, _X = np.mgrid[0:SIZE, 0:SIZE].astype(np.float32)


def mask(shape, cx, cy, r):
    dx, dy = _X - cx, _Y - cy
    if shape == "circle":
        return dx * dx + dy * dy <= r * r
    if shape == "square":
        return (abs(dx) <= r * 0.85) & (abs(dy) <= r * 0.85)
    if shape == "triangle":
        return (dy <= r * 0.8) & (abs(dx) <= (dy + r) * 0.55)
    if shape == "cross":
        return ((abs(dx) <= r * 0.3) & (abs(dy) <= r)) | ((abs(dy) <= r * 0.3) & (abs(dx) <= r))
    return abs(dx) + abs(dy) <= r  # diamond


def picture(figures, rng):
    """uint8 [48, 48, 3]; figures are (shape, colour, quadrant)."""
    shade = rng.range(0, 60)
    out = np.full((SIZE, SIZE, 3), shade, np.uint8)
    for shape, colour, quadrant in figures:
        r = rng.range(7, 10)
        cx = (12 if "left" in quadrant else 36) + rng.range(-2, 2)
        cy = (12 if "top" in quadrant else 36) + rng.range(-2, 2)
        out[mask(shape, cx, cy, r)] = RGB[colour]
    return out


def patches(pixels, size=4):
    """f32 [grid, 3 * size * size], row-major; each flattened channel, y, x; values in -1..1."""
    grid = SIZE // size
    x = (pixels.astype(np.float32) / 255 - 0.5) / 0.5
    x = x.reshape(grid, size, grid, size, 3).transpose(0, 2, 4, 1, 3)
    return x.reshape(grid * grid, 3 * size * size)


def png(pixels):
    """The picture as PNG bytes, standard library only."""
    import struct
    import zlib

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", SIZE, SIZE, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
