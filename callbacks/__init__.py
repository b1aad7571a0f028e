"""The catalogue: every optimization by name, and the classes that a user's own project imports."""

from typing import Any

from fasttrain.callbacks.anchor_matching import AnchorMatchingOptimization, FusedAnchorMatching, match_anchors
from fasttrain.callbacks.async_scoring import AsyncCOCOScoring, AsyncScorer, AsyncScoringOptimization
from fasttrain.callbacks.batched_nms import BatchedNMSOptimization, FusedBatchedNMS, batched_nms
from fasttrain.callbacks.bn_relu import BNReLUOptimization, FusedBNReLU
from fasttrain.callbacks.bottleneck import BottleneckOptimization, FusedBottlenecks
from fasttrain.callbacks.channels_last import ChannelsLast, ChannelsLastOptimization
from fasttrain.callbacks.compile import CompiledRegions, CompileOptimization, RegionalCompile
from fasttrain.callbacks.conv_bias_relu import ConvBiasReLUOptimization, FusedConvBiasReLU
from fasttrain.callbacks.cuda_graph_step import CapturedFunction, CUDAGraphStep, CUDAGraphStepOptimization
from fasttrain.callbacks.dali_loader import (
    ClassificationGraph,
    DALIConfig,
    DALILoader,
    DALILoaderOptimization,
    DetectionGraph,
    EncodedFiles,
    EncodedSamples,
    LabelledImages,
    UsableSamples,
    WhenBad,
    image_header,
    labelled_images,
    portable_pixmap,
    require_dali,
)
from fasttrain.callbacks.device_prefetch import DeviceBatches, DevicePrefetcher, DevicePrefetchOptimization
from fasttrain.callbacks.evaluation_cache import EvaluationCache, EvaluationCacheOptimization
from fasttrain.callbacks.evaluation_ranks import EvaluationRanks, EvaluationRanksOptimization
from fasttrain.callbacks.focal_loss import FocalLoss, FocalLossOptimization, FusedFocalLoss
from fasttrain.callbacks.fp8_linear import FP8LinearOptimization, FP8Linears
from fasttrain.callbacks.frozen_bn import FrozenBNOptimization, FusedFrozenBN
from fasttrain.callbacks.frozen_stem import FrozenStemOptimization, FusedFrozenStem
from fasttrain.callbacks.gemm_gelu import FeedForward, FusedGemmGELU, GemmGELUOptimization, linear_gelu_linear
from fasttrain.callbacks.gemm_relu import FusedGemmReLU, GemmReLUOptimization
from fasttrain.callbacks.graph_evaluation import GraphedEvaluation, GraphEvaluationOptimization
from fasttrain.callbacks.layer_norm_dropout import (
    DropoutAddLayerNorm,
    FusedDropoutAddLayerNorm,
    LayerNormDropoutOptimization,
    dropout_add_layer_norm,
)
from fasttrain.callbacks.optimizers import LAMB, LARS, FusedOptimizers, FusedOptimizersOptimization, parameter_groups
from fasttrain.callbacks.precision import PrecisionOptimization, fastest_precision
from fasttrain.callbacks.sequence_packing import (
    SequencePackingDataModule,
    SequencePackingOptimization,
    packed_attention,
)
from fasttrain.mlperf.logger import MLPerfLogger
from fasttrain.optimization import Optimization

CATALOGUE: dict[str, type[Optimization[Any]]] = {
    "anchor_matching": AnchorMatchingOptimization,
    "async_scoring": AsyncScoringOptimization,
    "batched_nms": BatchedNMSOptimization,
    "bn_relu": BNReLUOptimization,
    "bottleneck": BottleneckOptimization,
    "channels_last": ChannelsLastOptimization,
    "compile": CompileOptimization,
    "conv_bias_relu": ConvBiasReLUOptimization,
    "cuda_graph_step": CUDAGraphStepOptimization,
    "dali_loader": DALILoaderOptimization,
    "device_prefetch": DevicePrefetchOptimization,
    "evaluation_cache": EvaluationCacheOptimization,
    "evaluation_ranks": EvaluationRanksOptimization,
    "focal_loss": FocalLossOptimization,
    "fp8_linear": FP8LinearOptimization,
    "frozen_bn": FrozenBNOptimization,
    "frozen_stem": FrozenStemOptimization,
    "gemm_gelu": GemmGELUOptimization,
    "gemm_relu": GemmReLUOptimization,
    "graph_evaluation": GraphEvaluationOptimization,
    "layer_norm_dropout": LayerNormDropoutOptimization,
    "optimizers": FusedOptimizersOptimization,
    "precision": PrecisionOptimization,
    "sequence_packing": SequencePackingOptimization,
}

__all__ = [
    "CATALOGUE",
    "LAMB",
    "LARS",
    "AnchorMatchingOptimization",
    "AsyncCOCOScoring",
    "AsyncScorer",
    "AsyncScoringOptimization",
    "BNReLUOptimization",
    "BatchedNMSOptimization",
    "BottleneckOptimization",
    "CUDAGraphStep",
    "CUDAGraphStepOptimization",
    "CapturedFunction",
    "ChannelsLast",
    "ChannelsLastOptimization",
    "ClassificationGraph",
    "CompileOptimization",
    "CompiledRegions",
    "ConvBiasReLUOptimization",
    "DALIConfig",
    "DALILoader",
    "DALILoaderOptimization",
    "DetectionGraph",
    "DeviceBatches",
    "DevicePrefetchOptimization",
    "DevicePrefetcher",
    "DropoutAddLayerNorm",
    "EncodedFiles",
    "EncodedSamples",
    "EvaluationCache",
    "EvaluationCacheOptimization",
    "EvaluationRanks",
    "EvaluationRanksOptimization",
    "FP8LinearOptimization",
    "FP8Linears",
    "FeedForward",
    "FocalLoss",
    "FocalLossOptimization",
    "FrozenBNOptimization",
    "FusedAnchorMatching",
    "FusedBNReLU",
    "FusedBatchedNMS",
    "FusedBottlenecks",
    "FusedConvBiasReLU",
    "FusedDropoutAddLayerNorm",
    "FusedFocalLoss",
    "FusedFrozenBN",
    "FusedFrozenStem",
    "FusedGemmGELU",
    "FusedGemmReLU",
    "FusedOptimizers",
    "FusedOptimizersOptimization",
    "GemmGELUOptimization",
    "GemmReLUOptimization",
    "GraphEvaluationOptimization",
    "GraphedEvaluation",
    "LabelledImages",
    "LayerNormDropoutOptimization",
    "MLPerfLogger",
    "PrecisionOptimization",
    "RegionalCompile",
    "SequencePackingDataModule",
    "SequencePackingOptimization",
    "UsableSamples",
    "WhenBad",
    "batched_nms",
    "dropout_add_layer_norm",
    "fastest_precision",
    "image_header",
    "labelled_images",
    "linear_gelu_linear",
    "match_anchors",
    "packed_attention",
    "parameter_groups",
    "portable_pixmap",
    "require_dali",
]
