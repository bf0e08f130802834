"""A key vault's HTTP edge with real keys behind it, over TLS; it validates with the SDK's own models.

`Vault.client()` is what VaultKey hands to the SDK's clients: names under vault.azure.net lead to the port here, nowhere else.
"""

from __future__ import annotations

import base64
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from azure.core.credentials import AccessToken, AccessTokenInfo
from azure.keyvault.keys import ApiVersion
from azure.keyvault.keys._generated.models import KeySignParameters
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

VERSION = "0123456789abcdef0123456789abcdef"
TOKEN = "a-token-of-microsoft-entra"
TENANT = "11111111-2222-3333-4444-555555555555"
SECRET = "a-secret-of-a-service-principal"
CHALLENGE = f'Bearer authorization="https://login.microsoftonline.com/{TENANT}", resource="https://vault.azure.net"'
CURVES = {"secp256r1": "P-256", "secp384r1": "P-384", "secp256k1": "P-256K"}
HASHES = {"ES256": (32, hashes.SHA256()), "ES384": (48, hashes.SHA384())}


@dataclass
class Vault:
    """One vault. `keys` are by name; `refused` are those that the caller has no right to sign with."""

    keys: dict[str, ec.EllipticCurvePrivateKey]
    refused: tuple[str, ...] = ()
    signed: list[str] = field(default_factory=list)
    """Digests that it was asked to sign, in hex."""
    proxy: int = 0
    """Port of the proxy: whoever goes through it reaches this vault, and the login of its tenant, under their own names."""
    certificate: Path = Path()

    def client(self) -> dict[str, Any]:
        """What leads the SDK's clients here: a proxy, and the certificate to believe."""
        return {"proxies": {"https": f"http://127.0.0.1:{self.proxy}"}, "connection_verify": str(self.certificate)}

    def environment(self) -> dict[str, str]:
        """The same for a process of its own."""
        address = f"http://127.0.0.1:{self.proxy}"
        said = {"HTTPS_PROXY": address, "https_proxy": address, "NO_PROXY": "", "no_proxy": ""}
        return {**said, "REQUESTS_CA_BUNDLE": str(self.certificate), "SSL_CERT_FILE": str(self.certificate)}


class Identity:
    """A credential as azure-identity has them; it gives one token, and only for key vaults."""

    def __init__(self, token: str = TOKEN) -> None:
        self.token = token

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        assert scopes == ("https://vault.azure.net/.default",)
        return AccessToken(self.token, int(time.time()) + 3600)

    def get_token_info(self, *scopes: str, **_: Any) -> AccessTokenInfo:
        return AccessTokenInfo(*self.get_token(*scopes))


@contextmanager
def serving(vault: Vault, folder: Path) -> Iterator[Vault]:
    """The vault answers while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.vault = vault  # type: ignore[attr-defined]
    vault.certificate = folder / "vault.pem"
    _certificate(vault.certificate, folder / "vault.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(vault.certificate, folder / "vault.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    proxy.target = server.server_port  # type: ignore[attr-defined]
    vault.proxy = proxy.server_port
    for each in (server, proxy):
        threading.Thread(target=each.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield vault
    finally:
        for each in (server, proxy):
            each.shutdown()
            each.server_close()


class _Proxy(BaseHTTPRequestHandler):
    """CONNECT, to the one place that there is, whatever name is asked for."""

    def do_CONNECT(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.target)) as there:  # type: ignore[attr-defined]
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=_pour, args=(there, self.connection), daemon=True)
            back.start()
            _pour(self.connection, there)
            back.join()

    def log_message(self, *_: Any) -> None:
        pass


def _pour(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer("GET", b"")

    def do_POST(self) -> None:
        self._answer("POST", self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, method: str, body: bytes) -> None:
        vault: Vault = self.server.vault  # type: ignore[attr-defined]
        url = urlsplit(self.path)
        said = (
            self._login(url, body)
            or self._refusal(parse_qs(url.query))
            or _dispatch(vault, method, url.path.strip("/").split("/"), body)
        )
        code, answer = said
        data = json.dumps(answer).encode()
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", CHALLENGE)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _login(self, url: SplitResult, body: bytes) -> tuple[int, Any] | None:
        """Microsoft Entra, as far as a service principal with a secret asks it."""
        if self.headers["Host"].partition(":")[0] != "login.microsoftonline.com":
            return None
        here = f"https://login.microsoftonline.com/{TENANT}"
        if url.path.endswith("/openid-configuration"):
            named = {"authorization_endpoint": f"{here}/authorize", "token_endpoint": f"{here}/oauth2/v2.0/token"}
            return 200, {**named, "issuer": f"{here}/v2.0"}
        if url.path.endswith("/discovery/instance"):
            return 200, {"tenant_discovery_endpoint": f"{here}/v2.0/.well-known/openid-configuration", "metadata": []}
        asked = {key: value[0] for key, value in parse_qs(body.decode()).items()}
        if (asked["client_secret"], asked["scope"]) != (SECRET, "https://vault.azure.net/.default"):
            return 401, {
                "error": "invalid_client",
                "error_description": "AADSTS7000215: Invalid client secret provided.",
            }
        return 200, {"token_type": "Bearer", "expires_in": 3600, "access_token": TOKEN}

    def _refusal(self, query: dict[str, list[str]]) -> tuple[int, Any] | None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _error(401, "Unauthorized", "AKV10000: Request is missing a Bearer or PoP token.")
        versions = [version.value for version in ApiVersion]
        if query.get("api-version", [""])[0] not in versions:
            return _error(400, "BadParameter", "The specified version is not recognized")
        return None

    def log_message(self, *_: Any) -> None:
        pass


def _dispatch(vault: Vault, method: str, path: list[str], body: bytes) -> tuple[int, Any]:
    if path[0] != "keys" or path[1] not in vault.keys or (len(path) > 2 and path[2] not in ("", VERSION)):
        return _error(404, "KeyNotFound", f"A key with (name/id) {path[1:]} was not found in this key vault.")
    key = vault.keys[path[1]]
    identifier = f"https://acme.vault.azure.net/keys/{path[1]}/{VERSION}"
    if method == "GET":
        return 200, {"key": _jwk(key, identifier), "attributes": {"enabled": True}}
    if path[3:] != ["sign"]:
        return _error(400, "BadParameter", f"unknown operation {path[3:]}")
    if path[1] in vault.refused:
        return _error(403, "Forbidden", "Caller is not authorized to perform action on resource: keys/sign/action")
    return _sign(vault, key, identifier, body)


def _sign(vault: Vault, key: ec.EllipticCurvePrivateKey, identifier: str, body: bytes) -> tuple[int, Any]:
    asked = KeySignParameters(json.loads(body))
    size, kind = HASHES.get(asked["alg"], (0, None))
    digest = asked.value
    if kind is None or set(asked) != {"alg", "value"} or len(digest) != size or key.curve.key_size != size * 8:
        return _error(400, "BadParameter", "Algorithm, digest and key do not fit together")
    vault.signed.append(digest.hex())
    r, s = utils.decode_dss_signature(key.sign(digest, ec.ECDSA(utils.Prehashed(kind))))
    return 200, {"kid": identifier, "value": _text(r.to_bytes(size, "big") + s.to_bytes(size, "big"))}


def _jwk(key: ec.EllipticCurvePrivateKey, identifier: str) -> dict[str, Any]:
    numbers, size = key.public_key().public_numbers(), key.curve.key_size // 8
    x, y = _text(numbers.x.to_bytes(size, "big")), _text(numbers.y.to_bytes(size, "big"))
    return {
        "kid": identifier,
        "kty": "EC",
        "crv": CURVES[key.curve.name],
        "x": x,
        "y": y,
        "key_ops": ["sign", "verify"],
    }


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _error(code: int, name: str, message: str) -> tuple[int, Any]:
    return code, {"error": {"code": name, "message": message}}


def _certificate(path: Path, key_path: Path) -> None:
    """Signed by itself, for every name of a vault."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "key vault of the tests")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("*.vault.azure.net"), x509.DNSName("login.microsoftonline.com")]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
