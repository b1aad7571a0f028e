"""`python -m fasttrain` is `fasttrain`."""

from fasttrain.cli import main

main()
