import numpy as np
import pytest
import torch
from PIL import Image

from fasttrain.recipes.retinanet.pictures import PALETTE, class_color, contact_sheet, draw_detections

NAMES = ("car", "bus")


def draw(image: torch.Tensor, boxes: list[list[float]], labels: list[int], scores: list[float],
         truth: list[list[float]] | None = None) -> Image.Image:  # fmt: skip
    return draw_detections(
        image,
        torch.tensor(boxes).reshape(-1, 4),
        torch.tensor(labels, dtype=torch.int64),
        torch.tensor(scores),
        NAMES,
        None if truth is None else torch.tensor(truth),
    )


def grey(height: int, width: int) -> torch.Tensor:
    return torch.full((3, height, width), 128, dtype=torch.uint8)


def colors(picture: Image.Image) -> set[tuple[int, ...]]:
    return {tuple(pixel) for row in np.asarray(picture).tolist() for pixel in row}


def test_small_images_are_enlarged_and_large_ones_kept() -> None:
    assert draw(grey(96, 48), [], [], []).size == (240, 480)
    assert draw(grey(600, 800), [], [], []).size == (800, 600)


def test_channels_keep_their_order() -> None:
    image = torch.zeros(3, 500, 500, dtype=torch.uint8)
    image[0] = 200
    assert draw(image, [], [], []).getpixel((9, 9)) == (200, 0, 0)


def test_boxes_are_drawn_at_the_enlarged_place_in_their_class_color() -> None:
    picture = draw(grey(96, 96), [[20, 40, 60, 80]], [1], [0.9])
    assert picture.getpixel((100, 350)) == PALETTE[1]
    assert picture.getpixel((200, 300)) == (128, 128, 128)
    assert picture.getpixel((300, 399)) == PALETTE[1]


def test_the_tag_is_above_the_box_and_inside_it_at_the_upper_edge() -> None:
    above = draw(grey(480, 480), [[100, 200, 300, 400]], [0], [0.9])
    assert above.getpixel((102, 188)) == PALETTE[0]
    at_edge = draw(grey(480, 480), [[100, 0, 300, 400]], [0], [0.9])
    assert at_edge.getpixel((102, 4)) == PALETTE[0]
    assert at_edge.getpixel((102, 30)) == (128, 128, 128)


def test_a_tag_keeps_inside_the_picture_and_off_other_tags() -> None:
    picture = draw(grey(480, 480), [[470, 200, 479, 300], [470, 203, 479, 330]], [0, 1], [0.9, 0.8])
    tags = {color: [y for y in range(480) if picture.getpixel((440, y)) == color] for color in PALETTE[:2]}
    # Both stand beside their thin boxes, left of the edge, one above the other.
    assert max(tags[PALETTE[0]]) < min(tags[PALETTE[1]])


def test_tags_are_written_in_the_ink_that_contrasts() -> None:
    dark_ground = draw(grey(480, 480), [[100, 200, 300, 400]], [4], [0.9])
    light_ground = draw(grey(480, 480), [[100, 200, 300, 400]], [3], [0.9])
    assert (255, 255, 255) in colors(dark_ground)
    assert (255, 255, 255) not in colors(light_ground)
    assert (16, 18, 22) in colors(light_ground)


def test_padding_and_impossible_boxes_are_not_drawn() -> None:
    boxes: list[list[float]] = [[0, 0, 0, 0], [50, 50, 40, 60], [float("nan"), 0, 50, 50], [600, 600, 700, 700]]
    assert colors(draw(grey(480, 480), boxes, [0, 0, 0, 0], [0.9] * 4, truth=boxes)) == {(128, 128, 128)}


def test_a_box_that_leaves_the_image_is_drawn_along_its_edge() -> None:
    picture = draw(grey(480, 480), [[-50, 200, 900, 400]], [0], [0.9])
    assert picture.getpixel((0, 300)) == picture.getpixel((479, 300)) == PALETTE[0]


def test_ground_truth_is_dashed_in_white_on_dark() -> None:
    picture = draw(grey(480, 480), [], [], [], truth=[[100, 100, 200, 200], [0, 0, 0, 0]])
    edge = [picture.getpixel((x, 100)) for x in range(100, 201)]
    assert set(edge) == {(255, 255, 255), (16, 18, 22)}
    assert colors(picture) == {(255, 255, 255), (16, 18, 22), (128, 128, 128)}


def test_the_higher_score_is_on_top() -> None:
    boxes: list[list[float]] = [[100, 200, 300, 400], [100, 200, 300, 400]]
    assert draw(grey(480, 480), boxes, [0, 1], [0.3, 0.9]).getpixel((100, 300)) == PALETTE[1]
    assert draw(grey(480, 480), boxes, [0, 1], [0.9, 0.3]).getpixel((100, 300)) == PALETTE[0]


def test_half_precision_and_labels_without_a_name_are_drawn() -> None:
    boxes = torch.tensor([[100, 200, 300, 400]], dtype=torch.bfloat16)
    picture = draw_detections(
        grey(480, 480), boxes, torch.tensor([300]), torch.tensor([0.5], dtype=torch.bfloat16), NAMES
    )
    assert picture.getpixel((100, 300)) == class_color(300)
    assert len({class_color(label) for label in range(264)}) == 264


def test_contact_sheet_is_nearly_square_and_in_order() -> None:
    tiles = [Image.new("RGB", (40, 30), (index, 0, 0)) for index in range(5)]
    sheet = contact_sheet(tiles, gap=4)
    assert sheet.size == (3 * 44 + 4, 2 * 34 + 4)
    assert [sheet.getpixel((24 + 44 * (i % 3), 19 + 34 * (i // 3))) for i in range(5)] == [(i, 0, 0) for i in range(5)]
    assert sheet.getpixel((24 + 88, 19 + 34)) == (255, 255, 255)
    assert contact_sheet(tiles, columns=5, gap=4).size == (5 * 44 + 4, 34 + 4)
    with pytest.raises(ValueError, match="at least one picture"):
        contact_sheet([])
