"""The watches of several hosts: one acts for all, another has its place within half a minute, and who is gone is known."""

import pytest
from lease_service import LeaseService

from deployments.watch.hosts import GONE_SECONDS, Hosts
from tasks.common.claims import host_claim, run_claim, watch_claim
from tasks.common.errors import Missing
from tasks.config.database import keep, parse, platform_of

pytestmark = pytest.mark.unit

TICK = 5
"""Seconds between two turns of a watch."""


@pytest.fixture
def service():
    return LeaseService()


def watch(service, tmp_path, monkeypatch, host):
    process = service.process(host)
    keep(tmp_path, *parse("postgresql://me@db/plat"))
    made = Hosts(tmp_path, claims=lambda home: process, now=lambda: service.now)
    made.process = process

    def turn():
        monkeypatch.setattr("deployments.watch.hosts.socket.gethostname", lambda: host)
        made.tick(service.now)
        return made.act()

    made.turn = turn
    return made


@pytest.fixture
def two(service, tmp_path, monkeypatch):
    return [watch(service, tmp_path, monkeypatch, host) for host in ("one", "two")]


def test_the_only_watch_of_a_platform_in_files_acts_and_claims_nothing(tmp_path, service):
    """Other homes may work in the same store, each with a database, schedules and flow runs of its own."""
    for host in ("one", "two"):
        process = service.process(host)
        alone = Hosts(tmp_path, claims=lambda home, process=process: process)
        alone.tick(0.0)
        assert alone.act() and not alone.gone("other", "r")
    assert service.leases == {} and not list(tmp_path.iterdir())


def test_a_database_with_a_store_in_a_folder_is_of_one_host(tmp_path):
    keep(tmp_path, *parse("postgresql://me@db/plat"))
    alone = Hosts(tmp_path)
    alone.tick(0.0)
    assert alone.act() and not alone.gone("other", "r")


def test_platforms_of_two_databases_do_not_wait_for_each_other(two, service, tmp_path):
    assert two[0].turn()
    keep(tmp_path, *parse("postgresql://me@db/other"))
    process = service.process("three")
    third = Hosts(tmp_path, claims=lambda home: process)
    third.tick(0.0)
    assert third.act() and two[0].act()


def test_one_of_two_acts_and_the_other_has_its_place_within_half_a_minute(two, service):
    one, other = two
    assert (one.turn(), other.turn()) == (True, False)
    service.pass_time(60)
    assert (one.turn(), other.turn()) == (True, False), "as long as it lives"
    one.process.dead = True
    died = service.now
    while not other.turn():
        service.pass_time(TICK)
    assert service.now - died <= 30


def test_a_watch_that_was_stopped_does_not_act_beside_the_one_in_its_place(two, service):
    one, other = two
    one.turn(), other.turn()
    one.process.stopped = True
    service.pass_time(20)
    assert other.turn()
    one.process.stopped = False
    assert not one.act(), "before it renewed anything, or looked at any clock"
    assert not one.turn() and other.turn()


def test_while_the_store_is_away_nobody_acts_for_all_and_then_the_same_one_does(two, service):
    one, other = two
    one.turn(), other.turn()
    service.away = True
    service.pass_time(100)
    assert not one.act() and not other.act()
    service.away = False
    service.pass_time(1)
    assert (one.turn(), other.turn()) == (True, False)


def test_a_host_is_gone_when_nobody_has_held_its_claims_for_a_while(two, service):
    one, other = two
    one.turn(), other.turn()
    run = one.process.take(run_claim("r"))
    names = ("one", "r")
    one.process.dead = True
    service.pass_time(14)
    assert not other.gone(*names), "the leases may still be renewed"
    service.pass_time(1)
    assert not other.gone(*names), "and when they are out, a holder that lives may have them again"
    service.pass_time(GONE_SECONDS)
    assert other.gone(*names)
    assert run.lost is False, "the dead are not told"


def test_a_run_that_is_at_work_is_not_gone_though_the_watch_of_its_host_is(two, service):
    one, other = two
    one.turn(), other.turn()
    service.process("one").take(run_claim("r"))
    one.process.dead = True
    for _ in range(12):
        service.pass_time(TICK)
        assert not other.gone("one", "r")


def test_a_store_that_is_away_makes_nobody_gone(two, service):
    """What counts begins anew when it answers: who lives has its lease again before that time is over."""
    one, other = two
    one.turn(), other.turn()
    service.away = True
    service.pass_time(100)
    assert not other.gone("one", "r")
    service.away = False
    assert not other.gone("one", "r")
    service.pass_time(GONE_SECONDS + 1)
    assert not other.gone("one", "r"), "it lives, and renewed"


def test_two_hosts_of_one_name_are_told_so(service, tmp_path, monkeypatch):
    one, other = (watch(service, tmp_path, monkeypatch, "same") for _ in range(2))
    one.turn()
    with pytest.raises(Missing, match="another host of this platform is called same"):
        other.turn()
    platform = platform_of(one.home)
    assert (
        service.leases[watch_claim(platform)].note
        == service.leases[host_claim(platform, "same")].note
        == {"host": "same"}
    )


def test_a_watch_that_ends_in_order_gives_its_place_at_once(two, service):
    one, other = two
    one.turn(), other.turn()
    one.end()
    assert other.turn()
