"""DALI pipelines behind loaders that keep Lightning's contract."""

from fasttrain.callbacks.dali_loader.classification import ClassificationGraph
from fasttrain.callbacks.dali_loader.config import DALIConfig, require_dali
from fasttrain.callbacks.dali_loader.containers import labelled_images
from fasttrain.callbacks.dali_loader.detection import DetectionGraph
from fasttrain.callbacks.dali_loader.encoded import EncodedFiles, EncodedSamples, whole_file
from fasttrain.callbacks.dali_loader.graph import LoaderGraph
from fasttrain.callbacks.dali_loader.header import image_header
from fasttrain.callbacks.dali_loader.labelled import LabelledImages
from fasttrain.callbacks.dali_loader.loader import DALILoader
from fasttrain.callbacks.dali_loader.optimization import DALILoaderOptimization
from fasttrain.callbacks.dali_loader.tar_shards import sharded_files
from fasttrain.callbacks.dali_loader.usable import BLANK, BLANK_SIZE, UsableSamples, WhenBad, portable_pixmap

__all__ = [
    "BLANK",
    "BLANK_SIZE",
    "ClassificationGraph",
    "DALIConfig",
    "DALILoader",
    "DALILoaderOptimization",
    "DetectionGraph",
    "EncodedFiles",
    "EncodedSamples",
    "LabelledImages",
    "LoaderGraph",
    "UsableSamples",
    "WhenBad",
    "image_header",
    "labelled_images",
    "portable_pixmap",
    "require_dali",
    "sharded_files",
    "whole_file",
]
