"""What recipes on images are built on: decoding, files that can't be used, generated sets. No recipe by itself."""
