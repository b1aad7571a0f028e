import json
import math
import random
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image, ImageDraw
from rich.console import Console

from fasttrain import report
from fasttrain.errors import ConfigError

CONFIG = {
    "recipe": "retinanet",
    "seed": 1,
    "module": {"class": "fasttrain.recipes.retinanet.model.RetinaNetModule", "learning_rate": 0.002},
    "data": {"class": "fasttrain.recipes.retinanet.data.CocoData", "image_size": 96, "batch_size": 16},
    "target": {"metric": "map", "value": 0.4, "mode": "max", "stop": True},
    "optimizations": {"channels_last": {}, "precision": {"kind": "bf16"}, "cuda_graph": None},
}
ENVIRONMENT = {
    "gpu": None,
    "cpu": "Intel Xeon Platinum 8480C",
    "cores": 2,
    "memory": "7.8 GiB",
    "os": "Linux 6.1",
    "python": "3.11.7",
    "versions": {"torch": "2.14.1", "lightning": "2.6.6"},
    "git": {"commit": "1f0c2d9", "dirty": False},
}
PLAN = {
    "optimizations": [
        {
            "name": "channels_last",
            "verdict": "applies",
            "reason": "",
            "stage": "model",
            "grade": "same numbers",
            "changes": [
                {"path": "backbone.body", "what": "convolution weights to channels_last", "count": 24},
                {"path": "images", "what": "inputs to channels_last", "count": 1},
            ],
        },
        {
            "name": "precision",
            "verdict": "refused",
            "reason": "bf16 asked for, but this CPU has no bf16 instructions: it would run 9 times slower.",
            "stage": "plugins",
            "grade": "same quality",
            "changes": [],
        },
        {"name": "cuda_graph", "verdict": "off", "reason": "not asked for", "stage": "callbacks", "grade": "",
         "changes": []},
    ]
}  # fmt: skip


def write_run(folder: Path, *, seed: int = 1, status: str = "reached_target", quality: float = 0.4123,
              reached_seconds: float | None = 132.4, **result: Any) -> Path:  # fmt: skip
    """Write a run folder as `fasttrain fit` leaves it: a detector's curves, eleven scorings, two sample pictures."""
    (folder / "samples").mkdir(parents=True)
    noise = random.Random(seed)
    rows = ["step,epoch,seconds,name,value"]
    for step in range(10, 1321, 10):
        seconds, decay = 4 + step / 10, math.exp(-step / 300)
        classes, boxes = (0.25 + 0.9 * decay) * noise.gauss(1, 0.08), (0.2 + 0.35 * decay) * noise.gauss(1, 0.06)
        values = {"train_loss": classes + boxes, "cls_loss": classes, "box_loss": boxes, "lr": 2e-3 * decay,
                  "samples_per_second": 168 * noise.gauss(1, 0.03) - (40 if step < 40 else 0)}  # fmt: skip
        if step % 120 == 0:
            share = 1 - math.exp(-step / 420)
            values |= {"map": quality * share / (1 - math.exp(-1320 / 420)), "map_50": 0.68 * share}
        rows += [f"{step},{step // 120},{seconds:.3f},{name},{value:.6g}" for name, value in values.items()]
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    found = {
        "recipe": "retinanet",
        "status": status,
        "quality": {"name": "map", "value": quality, "best": quality},
        "target": {"name": "map", "value": 0.4, "mode": "max"},
        "reached": reached_seconds is not None,
        "reached_at": {"step": 1320, "epoch": 11, "seconds": reached_seconds, "samples": 21120}
        if reached_seconds is not None else None,
        "samples": 21120,
        "steps": 1320,
        "epochs": 11,
        "seconds": 140.0,
        "samples_per_second": 161.0,
        "breakdown_seconds": {"data_wait": 3.1, "host_to_device": 0.4, "step": 118.2, "evaluation": 9.8,
                              "checkpoint": 2.2, "start_up": 4.6, "other": 1.7},
        "bad_samples": {"skipped": 0},
        "error": None,
        "seed": seed,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(found | result))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (folder / "plan.json").write_text(json.dumps(PLAN))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"seed": seed}, sort_keys=False))
    for index in range(2):
        picture = Image.new("RGB", (96, 96), (40, 60 + 80 * index, 90))
        ImageDraw.Draw(picture).rectangle((20, 20, 70, 60), outline=(255, 200, 0))
        picture.save(folder / "samples" / f"{index}.png")
    return folder
