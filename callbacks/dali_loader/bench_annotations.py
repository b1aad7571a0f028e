"""Detection data for the bench: the same photograph-like JPEGs over and over."""

import json
import os
from pathlib import Path

BOXES = 7


def detection_files(paths: list[Path], height: int, width: int, images: int, classes: int = BOXES) -> Path:
    """Write COCO annotations of `images` images, the same files over and over, seven boxes each; return the path.

    Args:
        paths: of files in one folder, all of one size.
        height, width: of them.
        images: of the set.
        classes: that are annotated, all of them if there are boxes enough.
    """
    file = paths[0].parent / f"detection-{images}-{classes}.json"
    x, y = width / 1024, height / 768
    if not file.exists():
        records = [
            {"id": i, "file_name": paths[i % len(paths)].name, "width": width, "height": height} for i in range(images)
        ]
        boxes = [
            {
                "id": BOXES * i + k + 1,
                "image_id": i,
                "category_id": (BOXES * i + k) % classes,
                "bbox": [x * (40 + 90 * k), y * (30 + 40 * k), x * (120 + i % 50), y * (90 + i % 40)],
            }
            for i in range(images)
            for k in range(BOXES)
        ]
        categories = [{"id": k, "name": f"class {k}"} for k in range(classes)]
        text = json.dumps({"images": records, "annotations": boxes, "categories": categories})
        unfinished = file.with_name(f".{file.name}-{os.getpid()}")
        unfinished.write_text(text)
        unfinished.rename(file)
    return file
