"""The token budget of a step, divided among rows: chunked prefill beside decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowkv.policy.scheduling.job import RUNNING, Job

Key = Callable[[Job], tuple[float, ...]]


def divide(active: Sequence[Job], budget: int, page_size: int, rank: Key) -> list[tuple[Job, int]]:
    """Tokens that each row computes in a step.

    Rows that decode get their token first; if there are more of them than the budget has tokens,
    the first in the order get one, and a page of it, or half of it if that is less, is left to
    rows that are behind. The rest goes to these in their order. A chunk that does not end its
    prompt ends with a page where another row can use what that leaves, but the first of these
    always goes on. Nothing is left over while anybody could use it.

    Args:
        active: Rows that are in; those that do not run get nothing.
        budget: Most tokens.
        page_size: Tokens of a page.
        rank: The order.

    Returns:
        Rows that get any, and how many: decodes first.
    """
    shares: list[tuple[Job, int]] = []
    behind: list[Job] = []
    for job in active:
        if job.state == RUNNING:
            missing = job.prompt + job.made - job.ready
            if missing == 1:
                shares.append((job, 1))
            elif missing > 1:
                behind.append(job)
    kept = min(page_size, budget // 2) if behind else 0
    if len(shares) > budget - kept:
        shares.sort(key=lambda share: rank(share[0]))
        kept = min(kept, sum(job.missing for job in behind))
        del shares[budget - kept :]
    if not behind or len(shares) >= budget:
        return shares
    if len(behind) > 1:
        behind.sort(key=rank)
    return shares + _chunks(behind, budget - len(shares), page_size)


def _chunks(behind: Sequence[Job], left: int, page_size: int) -> list[tuple[Job, int]]:
    """Chunks of prompts in their order: to the end, or to the end of a page."""
    tokens: dict[Job, int] = {}
    for job in behind:
        chunk = min(job.missing, left)
        if chunk < job.missing:
            pages = max(0, (job.ready + chunk) // page_size * page_size - job.ready)
            chunk = pages if pages or tokens else chunk  # the first always goes on
        tokens[job] = chunk
        left -= chunk
        if not left:
            break
    for job in behind:  # what no other row could use
        extra = min(left, job.missing - tokens.get(job, 0))
        tokens[job] = tokens.get(job, 0) + extra
        left -= extra
        if not left:
            break
    return [(job, count) for job, count in tokens.items() if count]
