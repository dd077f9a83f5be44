"""What a schedule has broken."""


class Violation(AssertionError):
    """An invariant does not hold."""
