"""Runs in MLPerf Training's terms: result files, how they are scored and checked, and what a run would take.

The callback is `fasttrain.mlperf.logger.MLPerfLogger`; a report reads results without torch, so nothing is imported here.
"""
