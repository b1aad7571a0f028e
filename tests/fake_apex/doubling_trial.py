"""A trial as rooms write them, of the fake package."""


def trial() -> None:
    from apex.contrib.doubling import double

    assert double(21) == 42, "double(21) is not 42"
