"""The sizes that steps are captured in: few enough to capture, close enough that padding is cheap."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import ConfigError


def batch_buckets(max_batch_size: int, configured: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the batch sizes to capture, ascending.

    By default 1, 2, 4, then every eighth up to 128 and steps of an eighth of the size after that, so that a batch of
    more than 64 requests has at most an eighth of padding; the maximum is among them.

    Args:
        max_batch_size: Most requests of a step.
        configured: What the configuration names; empty for the default.

    Raises:
        ConfigError: A configured size is not positive or beyond the maximum.
    """
    return _chosen(max_batch_size, configured, (1, 2, 4), 8, 8)


def token_buckets(max_num_tokens: int, configured: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the token counts to capture a prefill in, ascending: steps of a quarter of the size by default.

    Args:
        max_num_tokens: Most query tokens of a captured prefill.
        configured: What the configuration names; empty for the default.

    Raises:
        ConfigError: A configured size is not positive or beyond the maximum.
    """
    return _chosen(max_num_tokens, configured, (4, 8), 16, 4)


def checked_buckets(buckets: Iterable[int]) -> tuple[int, ...]:
    """Return a runner's buckets, ascending and each once.

    Raises:
        ConfigError: There is none, or one is no whole number from 1.
    """
    given = tuple(buckets)
    wrong = [size for size in given if not isinstance(size, int) or size < 1]
    if wrong or not given:
        raise ConfigError(
            f"graph buckets {wrong}: a size is a whole number from 1" if wrong else "no graph bucket is given",
            key="graph_buckets",
            value=str(list(given)),
            allowed="1 …",
            remedy="take those of graphs.buckets: batch_buckets, or token_buckets for prefills",
        )
    return tuple(sorted(set(given)))


def _chosen(limit: int, configured: Iterable[int], small: tuple[int, ...], first: int, parts: int) -> tuple[int, ...]:
    given = sorted(set(configured))
    wrong = [size for size in given if not 1 <= size <= limit]
    if wrong or limit < 1:
        raise ConfigError(
            f"graph buckets {wrong} with a limit of {limit}",
            key="graph_buckets",
            value=str(wrong),
            allowed=f"1 … {limit}",
            remedy="leave out the sizes that no step can have, or raise the limit",
        )
    if given:
        return tuple(given)
    sizes, size = list(small), first
    while size < limit:
        sizes.append(size)
        # The largest power of two that is not above the size, in equal parts.
        size += max(first, (1 << (size.bit_length() - 1)) // parts)
    return (*(size for size in sizes if size < limit), limit)


def bucket_for(size: int, buckets: Iterable[int]) -> int | None:
    """Return the smallest bucket that holds a size, or None."""
    return min((bucket for bucket in buckets if bucket >= size), default=None)
