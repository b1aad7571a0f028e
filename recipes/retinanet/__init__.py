"""RetinaNet on COCO-format detection sets, as in MLPerf Training v2.0."""
