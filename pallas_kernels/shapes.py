"""Integer arithmetic on shapes. Knows nothing of arrays; works on Python integers and on traced ones alike."""


def ceil_div(a, b):
    """The smallest integer not below a / b, for b > 0."""
    return (a + b - 1) // b
