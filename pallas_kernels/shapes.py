"""Integer arithmetic on shapes. Knows nothing of arrays; works on Python integers and on traced ones alike."""


def ceil_div(a, b):
    """The smallest integer not below a / b, for b > 0."""
    return (a + b - 1) // b


def largest_divisor(n: int, limit: int) -> int:
    """The largest number not above `limit` that divides n."""
    return max(d for d in range(1, min(n, max(limit, 1)) + 1) if n % d == 0)
