"""How much one caller may ask for in a minute: requests, and tokens that are charged once they are known.

A request is counted before it is answered, its tokens after. So one answer may go beyond the tokens of a minute; what is beyond
is a debt, and its caller waits until later minutes have paid it. Counting is the `limits` library's, by a sliding window in
memory: a server that is started again forgets it.
"""

from __future__ import annotations

import math
import time

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from tasks.config.serving import LimitsConfig

LONGEST_SECONDS = 60


class Quotas:
    """The counts of all callers. State: their last two minutes, and their debts."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._counts = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._requests = RateLimitItemPerMinute(limits.requests_per_minute, namespace="requests")
        self._tokens = RateLimitItemPerMinute(limits.tokens_per_minute, namespace="tokens")
        self._debts: dict[str, int] = {}

    async def admit(self, caller: str) -> tuple[int, str]:
        """Count a request. Whole seconds that the caller must wait first, and of what there is too much; (0, "") lets it in."""
        if self._debts.get(caller):
            await self._pay(caller)
        if self._debts.get(caller) or not await self._counts.test(self._tokens, caller):
            return await self._wait(self._tokens, caller), "tokens"
        if not await self._counts.hit(self._requests, caller):
            return await self._wait(self._requests, caller), "requests"
        return 0, ""

    async def charge(self, caller: str, tokens: int) -> None:
        """Count the tokens of an answer, whether there is room for them or not."""
        if tokens > 0:
            self._debts[caller] = self._debts.get(caller, 0) + tokens
            await self._pay(caller)

    async def _pay(self, caller: str) -> None:
        """Move as much of a debt into this minute as there is room for."""
        room = (await self._counts.get_window_stats(self._tokens, caller)).remaining
        part = min(self._debts.get(caller, 0), room)
        if part and await self._counts.hit(self._tokens, caller, cost=part):
            self._debts[caller] -= part
        if not self._debts.get(caller):
            self._debts.pop(caller, None)

    async def _wait(self, item: RateLimitItemPerMinute, caller: str) -> int:
        reset = (await self._counts.get_window_stats(item, caller)).reset_time
        return max(1, min(LONGEST_SECONDS, math.ceil(reset - time.time())))
