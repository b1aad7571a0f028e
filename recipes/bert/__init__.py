"""BERT pre-training as in MLPerf Training v2.0."""
