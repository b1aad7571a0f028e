"""Detection data for the bench: the same photograph-like JPEGs over and over."""

import json
import os
from pathlib import Path


def detection_files(paths: list[Path], height: int, width: int, images: int) -> Path:
    """Write COCO annotations of `images` images, the same files over and over, seven boxes each; return the path."""
    file = paths[0].parent / f"detection-{images}.json"
    if not file.exists():
        records = [
            {"id": i, "file_name": paths[i % len(paths)].name, "width": width, "height": height} for i in range(images)
        ]
        boxes = [
            {"image_id": i, "category_id": k, "bbox": [40 + 90 * k, 30 + 40 * k, 120 + i % 50, 90 + i % 40]}
            for i in range(images)
            for k in range(7)
        ]
        categories = [{"id": k, "name": f"class {k}"} for k in range(7)]
        text = json.dumps({"images": records, "annotations": boxes, "categories": categories})
        unfinished = file.with_name(f".{file.name}-{os.getpid()}")
        unfinished.write_text(text)
        unfinished.rename(file)
    return file
