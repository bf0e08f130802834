"""An address out of an event is compared and never asked; what a blob is now, storage says."""

import azurite
import pytest
from event_stand import Blobs, blobs, body, config, known_key
from outgoing import Canary, connections

from deployments.bridge.blobs import allowed, list_many, read_again, strange
from deployments.bridge.messages import NotAllowed, read_events, to_event
from tasks.common.errors import Missing

ACCOUNT = "https://mine.blob.core.windows.net"
AZURE = config(
    containers=[
        {"url": f"{ACCOUNT}/data", "prefix": "in/", "include": "*.jsonl", "dataset": "corpus"},
        {"url": f"{ACCOUNT}/open", "dataset": "other"},
    ]
)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with known_key(), azurite.running(tmp_path_factory.mktemp("azurite"), in_memory=True) as started:
        yield started


@pytest.fixture
def own(service) -> Blobs:
    return blobs(service)


@pytest.mark.parametrize(
    ("rest", "name"),
    [
        ("data/in/a.jsonl", "in/a.jsonl"),
        ("data/in/deep/new%20file.jsonl", "in/deep/new file.jsonl"),
        ("data/in/new file.jsonl", "in/new file.jsonl"),
        ("data/in/%C3%BCber.jsonl", "in/über.jsonl"),
        ("data/in/über.jsonl", "in/über.jsonl"),
        ("data/in/a+b%2Bc%23d.jsonl", "in/a+b+c#d.jsonl"),
        ("data/in/..a..jsonl", "in/..a..jsonl"),
    ],
)
def test_addresses_of_the_configuration_are_taken(rest, name):
    with connections() as made:
        container, found = allowed(f"{ACCOUNT}/{rest}", AZURE)
    assert (container.dataset, found) == ("corpus", name)
    assert not made


FORGED = [
    "",
    "/etc/passwd",
    "file:///etc/passwd",
    "data/in/a.jsonl",
    f"{ACCOUNT}",
    f"{ACCOUNT}/",
    f"{ACCOUNT}/data",
    f"{ACCOUNT}/data/",
    f"{ACCOUNT}/data/in/",
    f"{ACCOUNT}/data/out/a.jsonl",
    f"{ACCOUNT}/data/inner/a.jsonl",
    f"{ACCOUNT}/data/in/a.txt",
    f"{ACCOUNT}/database/in/a.jsonl",
    f"{ACCOUNT}/data//in/a.jsonl",
    f"{ACCOUNT}//data/in/a.jsonl",
    f"{ACCOUNT}/data/in//a.jsonl",
    f"{ACCOUNT}/data/in/../out/a.jsonl",
    f"{ACCOUNT}/data/in/./a.jsonl",
    f"{ACCOUNT}/data/in/%2e%2e/out/a.jsonl",
    f"{ACCOUNT}/data/in/%2E./a.jsonl",
    f"{ACCOUNT}/data/in/..%2fout/a.jsonl",
    f"{ACCOUNT}/data/in/..%5Cout.jsonl",
    f"{ACCOUNT}/data/in/..\\out.jsonl",
    f"{ACCOUNT}/data/in/%252e%252e%252fout.jsonl",
    f"{ACCOUNT}/data/in/a%00.jsonl",
    f"{ACCOUNT}/data/in/a\x00.jsonl",
    f"{ACCOUNT}/data/in/a\n.jsonl",
    f"{ACCOUNT}/data/in/a%0d%0aHost:evil.jsonl",
    f"{ACCOUNT}/data/in/a.jsonl?sv=1&x=.jsonl",
    f"{ACCOUNT}/data/in/a.jsonl#.jsonl",
    f"{ACCOUNT}/data/in/%ff.jsonl",
    f"{ACCOUNT}/data/in/u\u0308ber.jsonl",
    f"{ACCOUNT}/data/in/u%CC%88ber.jsonl",
    f"{ACCOUNT}/data/in/\uff0e\uff0e\uff0fout.jsonl",
    f"{ACCOUNT}/data/in/\u2024\u2024/out.jsonl",
    f"{ACCOUNT}/data/in/a\u202elnosj.jsonl",
    f"{ACCOUNT}/data/in/a\u200b.jsonl",
    f"{ACCOUNT}/data/in/" + "a" * 1100 + ".jsonl",
    f"{ACCOUNT}:443/data/in/a.jsonl",
    f"{ACCOUNT}:8080/data/in/a.jsonl",
    f"{ACCOUNT}./data/in/a.jsonl",
    f"{ACCOUNT}.evil.example/data/in/a.jsonl",
    "http://mine.blob.core.windows.net/data/in/a.jsonl",
    "HTTPS://MINE.blob.core.windows.net/data/in/a.jsonl",
    "https://other.blob.core.windows.net/data/in/a.jsonl",
    "https://mine.dfs.core.windows.net/data/in/a.jsonl",
    "https://user@mine.blob.core.windows.net/data/in/a.jsonl",
    "https://mine.blob.core.windows.net@evil.example/data/in/a.jsonl",
    "https://mine.blob.core.windows.net%2fdata/in/a.jsonl",
    " https://mine.blob.core.windows.net/data/in/a.jsonl",
    "http://169.254.169.254/metadata/instance/data/in/a.jsonl",
    "http://[::ffff:169.254.169.254]/data/in/a.jsonl",
    "http://2852039166/data/in/a.jsonl",
    "http://127.0.0.1:8080/data/in/a.jsonl",
]


@pytest.mark.parametrize("url", FORGED)
def test_every_other_address_is_refused_without_a_connection(url):
    with connections() as made:
        with pytest.raises(NotAllowed) as refused:
            allowed(url, AZURE)
        with pytest.raises(NotAllowed):
            read_again(url, AZURE)
        assert not list_many([url] * 50, AZURE)
    assert not made, "somebody was asked"
    assert str(refused.value).isprintable()


def test_strange_names_are_known():
    assert not any(strange(name) for name in ("a", "a/b.c", "Ä/é.txt", "1 2"))
    assert all(
        strange(name) for name in ("", "a//b", "../a", "a/..", "a\\b", "a\tb", "e\u0301", "a\u2100b", "x" * 1025)
    )


def test_what_the_blob_is_storage_says_and_not_the_event(own):
    etag = own.put("in/a.jsonl", b"x" * 77)
    (told,) = read_events(body(own.created("in/a.jsonl", etag="0xFORGED")))
    event = to_event(told, config(containers=[own.config()]), "queue")
    assert event.object == f"{own.url}/in/a.jsonl#{etag}"
    assert (event.name, event.subject, event.data["bytes"]) == ("data.arrived", "dataset/corpus", 77)
    newer = own.put("in/a.jsonl", b"y")
    assert to_event(told, config(containers=[own.config()]), "queue").object == f"{own.url}/in/a.jsonl#{newer}"


def test_names_that_need_quoting_are_found_again(own):
    for name in ("in/new file.jsonl", "in/über.jsonl", "in/a#b.jsonl", "in/100 % sure.jsonl".replace(" % ", " ")):
        etag = own.put(name)
        found = read_again(own.created(name)["data"]["url"], config(containers=[own.config()]))
        assert (found.name, found.etag) == (name, etag)


def test_a_blob_that_is_gone_is_refused_and_storage_that_is_away_is_not(own):
    own.put("a")
    own.client.delete_blob("a")
    with pytest.raises(NotAllowed, match="is gone"):
        read_again(f"{own.url}/a", config(containers=[own.config()]))
    own.client.delete_container()
    with pytest.raises(Missing, match="no such container"):
        read_again(f"{own.url}/a", config(containers=[own.config()]))


def test_many_blobs_are_looked_at_by_one_listing(own):
    etags = {f"in/{number:03d}.jsonl": own.put(f"in/{number:03d}.jsonl") for number in range(40)}
    own.put("in/other.jsonl")
    events = config(containers=[own.config(prefix="in/")])
    urls = [f"{own.url}/{name}" for name in etags] + [f"{own.url}/in/gone.jsonl", "http://169.254.169.254/in/a"]
    listed = list_many(urls, events)
    assert {name: blob.etag for (_, name), blob in listed.items()} == etags
    one = f"{own.url}/in/007.jsonl"
    assert read_again(one, events, listed).object == read_again(one, events).object
    assert not list_many(urls[:5], events), "a few are asked for one by one"


def test_forged_addresses_reach_nobody(own):
    """A canary listens beside the real storage; only the address of the configuration may be connected to."""
    own.put("in/a.jsonl")
    events = config(containers=[own.config(prefix="in/")])
    with Canary().running() as canary, connections() as made:
        bad, good = f"127.0.0.1:{canary.port}", f"127.0.0.1:{own.service.port}"
        path = own.url.removeprefix(f"http://{good}")
        forged = [
            f"http://{bad}{path}/in/a.jsonl",
            f"http://{good}@{bad}{path}/in/a.jsonl",
            f"http://{bad}#@{good}{path}/in/a.jsonl",
            f"http://{bad}\\@{good}{path}/in/a.jsonl",
            f"http://{good}.{bad}{path}/in/a.jsonl",
            f"http://localhost:{canary.port}{path}/in/a.jsonl",
            f"http://{good}{path}/in/../../../{bad}/a.jsonl",
            f"http://{good}{path}/in/a.jsonl?restype=http://{bad}",
            f"//{bad}{path}/in/a.jsonl",
        ]
        for url in forged:
            said = own.created("in/a.jsonl")
            said["data"] |= {"url": url, "validationUrl": f"http://{bad}/validate"}
            (told,) = read_events(body(said))
            with pytest.raises(NotAllowed):
                to_event(told, events, "queue")
        assert not made
        said = own.created("in/a.jsonl")
        said["data"]["blobUrl"] = said["data"]["validationUrl"] = f"http://{bad}/x"
        assert to_event(read_events(body(said))[0], events, "queue").object.startswith(own.url)
        assert {address for address in made if address[0] != "name"} == {("127.0.0.1", own.service.port)}
    assert canary.hits == []


def test_a_connection_string_of_another_account_is_told_and_not_used(own):
    other = config(containers=[own.config(url=own.url.replace("devstoreaccount1", "anotheraccount"))])
    with connections() as made, pytest.raises(Missing, match="names the account anotheraccount") as told:
        read_again(f"{other.containers[0].url}/a", other)
    assert not made
    assert azurite.KEY not in str(told.value)
