"""A signed folder passes as it was signed and in no other state."""

import base64
import json
import os
import shutil
import stat

import pytest

from tasks.errors import IntegrityError, Missing
from tasks.signing import ensure_key, public_key_of, sign_folder, verify_folder


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """A folder of three files, its signature and the key: read only, tests copy the folder."""
    root = tmp_path_factory.mktemp("signing")
    folder = root / "model"
    (folder / "deep").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"graph")
    (folder / "model.onnx.data").write_bytes(bytes(range(256)) * 64)
    (folder / "deep" / "tokenizer.json").write_text("{}")
    key = ensure_key(root / "keys")
    return folder, sign_folder(folder, key), key


@pytest.fixture
def copy(signed, tmp_path):
    return shutil.copytree(signed[0], tmp_path / "copy")


def flip(folder):
    data = bytearray((folder / "model.onnx.data").read_bytes())
    data[1000] ^= 1
    (folder / "model.onnx.data").write_bytes(data)


def remove(folder):
    (folder / "deep" / "tokenizer.json").unlink()


def add(path):
    def tamper(folder):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text("payload")

    return tamper


def link_file(folder):
    (folder / "model.onnx").rename(folder.parent / "elsewhere")
    (folder / "model.onnx").symlink_to(folder.parent / "elsewhere")


def link_folder(folder):
    (folder / "deep").rename(folder.parent / "deep")
    (folder / "deep").symlink_to(folder.parent / "deep")


def hard_link(folder):
    os.link(folder / "model.onnx", folder.parent / "second-name")


def pipe(folder):
    os.mkfifo(folder / "pipe")


def rename(folder):
    (folder / "model.onnx").rename(folder / "model2.onnx")


CASES = [
    (flip, {"model.onnx.data": "sha256"}),
    (remove, {"deep/tokenizer.json": "missing"}),
    (add("extra.bin"), {"extra.bin": "extra"}),
    (add(".hidden"), {".hidden": "extra"}),
    (add(".git/hook"), {".git/hook": "extra"}),
    (add(".gitignore"), {".gitignore": "extra"}),
    (add("__pycache__/x.pyc"), {"__pycache__/x.pyc": "extra"}),
    (link_file, {"model.onnx": "link"}),
    (link_folder, {"deep": "link"}),
    (hard_link, {"model.onnx": "link"}),
    (pipe, {"pipe": "link"}),
    (rename, {"model.onnx": "missing", "model2.onnx": "extra"}),
]


@pytest.mark.parametrize(("tamper", "expected"), CASES, ids=lambda case: getattr(case, "__name__", None))
def test_every_change_is_refused_and_named(signed, copy, tamper, expected):
    tamper(copy)
    with pytest.raises(IntegrityError) as refused:
        verify_folder(copy, signed[1], public_key_of(signed[2]))
    assert {problem["path"]: problem["problem"] for problem in refused.value.problems} == expected
    assert all(name in refused.value.message for name in expected)


def test_an_untouched_copy_under_another_name_passes(signed, copy):
    verify_folder(copy, signed[1], public_key_of(signed[2]))


def test_signing_leaves_the_folder_as_it_was_and_refuses_links(signed, copy):
    assert sorted(path.name for path in signed[0].rglob("*")) == [
        "deep",
        "model.onnx",
        "model.onnx.data",
        "tokenizer.json",
    ]
    link_file(copy)
    with pytest.raises(IntegrityError, match=r"model\.onnx: it is a symbolic link"):
        sign_folder(copy, signed[2])


def test_another_key_does_not_verify(signed, tmp_path):
    other = public_key_of(ensure_key(tmp_path / "keys"))
    with pytest.raises(IntegrityError, match="Key mismatch"):
        verify_folder(signed[0], signed[1], other)
    with pytest.raises(Missing):
        verify_folder(signed[0], signed[1], tmp_path / "none.pub")


def test_a_forged_bundle_is_refused(signed, copy):
    """The attacker changes a file and the digest of it in the payload, but cannot sign that."""
    flip(copy)
    bundle = json.loads(signed[1])
    fresh = json.loads(sign_folder(copy, signed[2]))
    bundle["dsseEnvelope"]["payload"] = fresh["dsseEnvelope"]["payload"]
    with pytest.raises(IntegrityError, match="not made over this content by this key"):
        verify_folder(copy, json.dumps(bundle).encode(), public_key_of(signed[2]))


def test_a_signature_with_an_ignore_list_is_refused_though_our_key_made_it(signed, tmp_path):
    from model_signing import signing

    signing.Config().use_elliptic_key_signer(private_key=signed[2]).sign(signed[0], tmp_path / "lax.sig")
    lax = (tmp_path / "lax.sig").read_bytes()
    assert b".git" in base64.b64decode(json.loads(lax)["dsseEnvelope"]["payload"])
    with pytest.raises(IntegrityError, match="leaves files unchecked"):
        verify_folder(signed[0], lax, public_key_of(signed[2]))


@pytest.mark.parametrize("broken", [b"", b"{}", b"[]", b"\xff\xfe", b'{"dsseEnvelope": {"payload": "AAAA"}}'])
def test_a_broken_bundle_is_an_integrity_error(signed, broken):
    with pytest.raises(IntegrityError, match="no model-signing bundle"):
        verify_folder(signed[0], broken, public_key_of(signed[2]))


def test_a_cut_signature_value_is_an_integrity_error(signed):
    bundle = json.loads(signed[1])
    bundle["dsseEnvelope"]["signatures"] = []
    with pytest.raises(IntegrityError):
        verify_folder(signed[0], json.dumps(bundle).encode(), public_key_of(signed[2]))


def test_the_key_is_private_and_stays(tmp_path):
    key = ensure_key(tmp_path / "keys")
    before = key.read_bytes()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert key.stat().st_nlink == 1
    public_key_of(key).unlink()
    assert ensure_key(tmp_path / "keys").read_bytes() == before
    assert sorted(path.name for path in key.parent.iterdir()) == ["signing.pem", "signing.pub"]
    key.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        ensure_key(tmp_path / "keys")
