"""ResNet-50 v1.5 on folders of images, as in MLPerf Training v2.0."""
