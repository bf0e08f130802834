"""Azure's Retail Prices API at its HTTP edge: answers of its form, page by page, by its own conditions; it can fail.

Every request must name the API version and a currency, and have a condition that it understands, with values as they are spelt.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

API_VERSION = "2023-01-01-preview"
FIELDS = ("serviceName", "armRegionName", "armSkuName", "productName", "meterName", "priceType")
EQUALS = re.compile(r"(\w+) eq '([^']*)'")
CONTAINS = re.compile(r"contains\((\w+), '([^']*)'\)")


def item(size: str = "Standard_ND96amsr_A100_v4", price: float = 32.77, **more: Any) -> dict[str, Any]:
    """A meter of a machine, as the API writes one."""
    name = size.removeprefix("Standard_").replace("_", " ")
    return {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": price,
        "unitPrice": price,
        "armRegionName": "eastus",
        "location": "US East",
        "effectiveStartDate": "2024-01-01T00:00:00Z",
        "meterId": "000a794b-bdb0-58be-a0cd-0c3a0f222923",
        "meterName": name,
        "productId": "DZH318Z0BQPS",
        "skuId": "DZH318Z0BQPS/00TG",
        "productName": "Virtual Machines NDamsrA100v4 Series",
        "skuName": name,
        "serviceName": "Virtual Machines",
        "serviceId": "DZH313Z7MMC8",
        "serviceFamily": "Compute",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "isPrimaryMeterRegion": True,
        "armSkuName": size,
        **more,
    }


def stored(product: str, meter: str, price: float, unit: str = "1 GB/Month", **more: Any) -> dict[str, Any]:
    """A meter of storage."""
    service = {"Azure NetApp Files": "Azure NetApp Files", "Rtn Preference: MGN": "Bandwidth"}.get(product, "Storage")
    said = {"productName": product, "meterName": meter, "skuName": meter, "unitOfMeasure": unit, "serviceName": service}
    return item("", price, **said, **more)


@dataclass
class Trouble:
    """What the next request gets instead of its answer."""

    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    whole: bool = True
    """Whether as many bytes come as were announced."""


class RetailPrices(ThreadingHTTPServer):
    """The service. `items` is all that it knows, `troubles` what comes first; `asked` are the conditions of first pages."""

    daemon_threads = True

    def __init__(self, items: list[dict[str, Any]], page: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.items, self.page, self.currency = items, page, "USD"
        self.troubles: list[Trouble] = []
        self.asked: list[str] = []
        self.requests = 0
        self.next_link: str | None = None
        """Given as NextPageLink of every page, in place of the right one."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/api/retail/prices"


@contextmanager
def retail_prices(items: list[dict[str, Any]], *, page: int = 100) -> Iterator[RetailPrices]:
    server = RetailPrices(items, page)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RetailPrices

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests += 1
        if self.server.troubles:
            trouble = self.server.troubles.pop(0)
            return self._send(trouble.status, trouble.body or b"{}", trouble.headers, whole=trouble.whole)
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        try:
            return self._send(200, json.dumps(self._answer(parts.path, query)).encode(), {})
        except ValueError as error:
            return self._send(400, json.dumps({"Error": {"Message": str(error)}}).encode(), {})

    def _answer(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        if path != "/api/retail/prices" or query.get("api-version") != API_VERSION:
            raise ValueError(f"no such API: {path} {query.get('api-version')}")
        if not re.fullmatch("'[A-Z]{3}'", query.get("currencyCode", "")):
            raise ValueError("Invalid currencyCode")
        condition, skip = query.get("$filter", ""), int(query.get("$skip", "0"))
        found = [one for one in self.server.items if _holds(condition, one)]
        if not skip:
            self.server.asked.append(condition)
        items = found[skip : skip + self.server.page]
        more = skip + self.server.page < len(found)
        return {
            "BillingCurrency": self.server.currency,
            "CustomerEntityId": "Default",
            "CustomerEntityType": "Retail",
            "Items": [{**one, "currencyCode": self.server.currency} for one in items],
            "NextPageLink": self.server.next_link or (self._link(query, skip) if more else None),
            "Count": len(items),
        }

    def _link(self, query: dict[str, str], skip: int) -> str:
        rest = "&".join(f"{name}={quote(value)}" for name, value in query.items() if name != "$skip")
        return f"{self.server.url}?{rest}&$skip={skip + self.server.page}"

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, whole: bool = True) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) + (0 if whole else 100)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = not whole


def _holds(condition: str, one: dict[str, Any]) -> bool:
    """Conditions of `eq` and `contains`, joined by and, with or in brackets."""
    if not condition:
        raise ValueError("a condition is needed here: the whole list has a million meters")
    for part in re.split(r" and (?![^()]*\))", condition):
        among = [_one_holds(each, one) for each in part.strip("()" if " or " in part else "").split(" or ")]
        if not any(among):
            return False
    return True


def _one_holds(said: str, one: dict[str, Any]) -> bool:
    for form, holds in ((EQUALS, lambda have, want: have == want), (CONTAINS, lambda have, want: want in have)):
        found = form.fullmatch(said.strip().strip("()") if form is EQUALS else said.strip())
        if found and found[1] in FIELDS:
            return bool(holds(str(one.get(found[1], "")), found[2]))
    raise ValueError(f"Invalid OData parameters supplied: {said}")
