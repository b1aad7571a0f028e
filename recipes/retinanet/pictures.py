"""Detections drawn on their images: boxes in one colour per class, a tag with class and score, ground truth dashed."""

import colorsys
import math
from collections.abc import Iterator, Sequence

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

LONG_SIDE = 480
"""Smaller images are enlarged to this many pixels before drawing, so that lines and letters are thin beside objects."""

PALETTE = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)
"""Okabe and Ito's colours (Color Universal Design, 2008) without black."""

INK = (16, 18, 22)
WHITE = (255, 255, 255)

Box = tuple[float, float, float, float]
Color = tuple[int, int, int]


def draw_detections(
    image: Tensor,
    boxes: Tensor,
    labels: Tensor,
    scores: Tensor,
    class_names: Sequence[str],
    ground_truth: Tensor | None = None,
) -> Image.Image:
    """Return an RGB picture of one image with its detections, small images enlarged.

    Args:
        image: uint8 (3, H, W), RGB.
        boxes: float (N, 4), x1 y1 x2 y2 in pixels of `image`. Boxes without area, such as padding, are not drawn.
        labels: int (N,), indices into `class_names`; one beyond the names is shown as its number.
        scores: float (N,), the highest drawn last, on top.
        ground_truth: float (G, 4), drawn as dashed white lines; padding rows are skipped.
    """
    picture, scale = _enlarged(image)
    draw = ImageDraw.Draw(picture)
    width = max(2, round(max(picture.size) / 240))
    for _, box in _visible(ground_truth, scale, picture.size) if ground_truth is not None else ():
        _dashed_rectangle(draw, box)
    rank = {index: place for place, index in enumerate(scores.argsort(descending=True).tolist())}
    found = sorted(_visible(boxes, scale, picture.size), key=lambda item: rank[item[0]], reverse=True)
    for index, box in found:
        draw.rectangle(box, outline=class_color(int(labels[index])), width=width)
    placed: list[Box] = []
    for index, box in reversed(found):
        label = int(labels[index])
        name = class_names[label] if 0 <= label < len(class_names) else str(label)
        _tag(draw, box, f"{name} {float(scores[index]):.2f}", class_color(label), picture.size, placed)
    return picture


def contact_sheet(images: Sequence[Image.Image], columns: int | None = None, gap: int = 8) -> Image.Image:
    """Return the pictures side by side on white, as near to a square as their number allows, in the order given.

    Raises:
        ValueError: there are no pictures.
    """
    if not images:
        raise ValueError("contact_sheet() needs at least one picture")
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    width, height = (max(image.size[axis] for image in images) for axis in (0, 1))
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap), WHITE)
    for index, image in enumerate(images):
        left = gap + index % columns * (width + gap) + (width - image.width) // 2
        top = gap + index // columns * (height + gap) + (height - image.height) // 2
        sheet.paste(image, (left, top))
    return sheet


def class_color(label: int) -> Color:
    """Return a class's colour: the palette's first, then hues a golden angle apart."""
    if 0 <= label < len(PALETTE):
        return PALETTE[label]
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1, 0.65, 0.95)
    return round(red * 255), round(green * 255), round(blue * 255)


def _enlarged(image: Tensor) -> tuple[Image.Image, float]:
    picture = Image.fromarray(image.detach().cpu().permute(1, 2, 0).contiguous().numpy())
    scale = max(1.0, LONG_SIDE / max(picture.size))
    if scale == 1:
        return picture, scale
    size = round(picture.width * scale), round(picture.height * scale)
    return picture.resize(size, Image.Resampling.BICUBIC), scale


def _visible(boxes: Tensor, scale: float, size: tuple[int, int]) -> Iterator[tuple[int, Box]]:
    """Yield (row, box in pixels of the picture, cut at its edges) of the finite boxes that have an area inside it."""
    for index, row in enumerate(boxes.detach().float().cpu().tolist()):
        if all(map(math.isfinite, row)):
            x1, y1, x2, y2 = (min(max(v * scale, 0.0), size[axis % 2] - 1.0) for axis, v in enumerate(row))
            if x2 > x1 and y2 > y1:
                yield index, (x1, y1, x2, y2)


def _dashed_rectangle(draw: ImageDraw.ImageDraw, box: Box, dash: int = 6) -> None:
    """Draw thin dashes in white on a dark line, visible on light and dark ground alike."""
    x1, y1, x2, y2 = map(round, box)
    draw.rectangle((x1, y1, x2, y2), outline=INK, width=1)
    for start in range(x1, x2, 2 * dash):
        for y in (y1, y2):
            draw.line((start, y, min(start + dash, x2), y), fill=WHITE)
    for start in range(y1, y2, 2 * dash):
        for x in (x1, x2):
            draw.line((x, start, x, min(start + dash, y2)), fill=WHITE)


def _tag(
    draw: ImageDraw.ImageDraw, box: Box, text: str, color: Color, size: tuple[int, int], placed: list[Box]
) -> None:
    """Draw a label where it fits: above the box, else inside it, else below, away from the labels in `placed`."""
    font = ImageFont.load_default(max(12.0, max(size) / 30))
    # Measured on letters of full height, so that all tags of a picture are equally high.
    _, top, _, bottom = draw.textbbox((0, 0), "Hg", font=font)
    width, height = math.ceil(draw.textlength(text, font=font)) + 8, math.ceil(bottom - top) + 4
    x = _clamped(box[0], size[0] - width)
    spots = [(x, _clamped(y, size[1] - height)) for y in (box[1] - height, box[1], box[3], box[3] - height)]
    tags = [(x, y, x + width, y + height) for x, y in spots]
    tag = min(tags, key=lambda candidate: sum(_overlap(candidate, other) for other in placed))
    placed.append(tag)
    draw.rectangle(tag, fill=color)
    draw.text((tag[0] + 4, tag[1] + 2 - math.floor(top)), text, font=font, fill=_readable_on(color))


def _clamped(value: float, highest: int) -> int:
    return max(0, min(round(value), highest))


def _overlap(first: Box, second: Box) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return max(width, 0.0) * max(height, 0.0)


def _readable_on(color: Color) -> Color:
    """Return near-black or white, whichever contrasts more by WCAG 2.2's relative luminance."""
    red, green, blue = ((c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color)
    return INK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else WHITE
