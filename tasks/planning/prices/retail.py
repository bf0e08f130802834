"""Asks Azure's Retail Prices API: all pages of an answer, or none. No account, nothing about us is sent.

https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices: `$filter` in OData, values with their case
as they are since 2023-01-01-preview; NextPageLink leads on. What is made of the items is meters.py, what is kept update.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx

from tasks.common.errors import Missing

API_VERSION = "2023-01-01-preview"
"""The only one that tells savings plans."""
TIMEOUT_SECONDS = 30.0
ATTEMPTS = 4
"""Of one page; between them 1, 2 and 4 seconds, or what Retry-After says."""
LONGEST_WAIT_SECONDS = 60.0
"""That a Retry-After is followed for; a longer one is an error that says so."""
MOST_PAGES = 200
"""Of one question; a region's GPU sizes take a few."""
MOST_BYTES = 20_000_000
"""Of one page; a thousand items take about one million."""
PORTS = {"http": 80, "https": 443}
TRY_LATER = "The prices of before stay. Try again later; `headway prices` shows what is known."


class Retail:
    """A connection to the API at `url`; State: the open connection."""

    def __init__(self, url: str, *, currency: str = "USD") -> None:
        self._url, self._currency = url, currency
        self._client = httpx.Client(timeout=TIMEOUT_SECONDS, headers={"User-Agent": "headway"})

    def __enter__(self) -> Retail:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, condition: str) -> Iterator[dict[str, Any]]:
        """All items for a condition, page by page. Raises Missing where an answer cannot be had whole."""
        query = {"api-version": API_VERSION, "currencyCode": f"'{self._currency}'", "$filter": condition}
        link: str | None = str(httpx.URL(self._url, params=query))
        seen: set[str] = set()
        while link:
            if link in seen:
                raise Missing(f"{self._url} leads in a circle: a page was given twice", remedy=TRY_LATER)
            if len(seen) >= MOST_PAGES:
                raise Missing(f"{self._url} gave {MOST_PAGES} pages and more for one question", remedy=TRY_LATER)
            seen.add(link)
            page = self._page(link)
            yield from page["Items"]
            link = self._next(page)

    def _next(self, page: dict[str, Any]) -> str | None:
        """Where it goes on; at the same place only."""
        link = page.get("NextPageLink")
        if link and (not isinstance(link, str) or _place(link) != _place(self._url)):
            raise Missing(
                f"{self._url} leads on to another place, {str(link)[:80]!r}: it is not asked", remedy=TRY_LATER
            )
        return link or None

    def _page(self, link: str) -> dict[str, Any]:
        """One page. An answer that may be better the next time is asked for again."""
        why = ""
        for attempt in range(ATTEMPTS):
            wait = float(2**attempt)
            try:
                answer = self._client.get(link)
                if answer.status_code == 200:
                    return self._checked(answer)
                why = f"it answers {answer.status_code}"
                if answer.status_code not in (408, 429) and answer.status_code < 500:
                    raise Missing(f"{self._url}: {why}: {answer.text[:200]}", remedy=TRY_LATER)
                wait = _told_to_wait(answer, wait)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
            if wait > LONGEST_WAIT_SECONDS:
                raise Missing(f"{self._url}: {why}, and asks to wait {wait:.0f} s", remedy=TRY_LATER)
            if attempt < ATTEMPTS - 1:
                time.sleep(wait)
        raise Missing(f"{self._url} gave no prices in {ATTEMPTS} attempts: {why}", remedy=TRY_LATER)

    def _checked(self, answer: httpx.Response) -> dict[str, Any]:
        """Raises ValueError for what may be right the next time, and Missing for what is wrong for good."""
        if len(answer.content) > MOST_BYTES:
            raise Missing(f"{self._url}: a page of {len(answer.content)} bytes", remedy=TRY_LATER)
        page = answer.json()
        if not isinstance(page, dict) or not isinstance(page.get("Items"), list):
            raise ValueError("the answer has no Items")
        if not all(isinstance(item, dict) for item in page["Items"]):
            raise ValueError("an item of the answer is no object")
        given = {page.get("BillingCurrency"), *(item.get("currencyCode") for item in page["Items"])}
        if given != {self._currency}:
            wrong = ", ".join(sorted(str(one) for one in given - {self._currency}))
            raise Missing(f"{self._url} was asked for {self._currency} and answers in {wrong}", remedy=TRY_LATER)
        return page


def quoted(value: str) -> str:
    """A text of a condition. OData doubles a quotation mark."""
    return "'" + value.replace("'", "''") + "'"


def _told_to_wait(answer: httpx.Response, otherwise: float) -> float:
    """Retry-After in seconds; a date is not followed."""
    told = answer.headers.get("Retry-After", "")
    return float(told) if told.isdigit() else otherwise


def _place(link: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(link)
    return parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme)
