"""The leases of a store that several hosts share, by a clock that a test moves: what tasks/storage/blob/claims.py has of Azure.

A process that lives renews its leases as time passes; one that is stopped, dead or cut off does not. What a real Azurite does is
in tests/integration/tasks/storage/test_claims.py.
"""

from dataclasses import dataclass, field

from tasks.common.errors import Missing, Superseded

LASTS = 15.0


@dataclass
class Lease:
    """The last one on a name."""

    holder: object = None
    until: float = 0.0
    note: dict = field(default_factory=dict)


@dataclass
class LeaseService:
    now: float = 0.0
    away: bool = False
    """Whether it gives no answer to anybody."""
    leases: dict = field(default_factory=dict)
    processes: list = field(default_factory=list)

    def process(self, host):
        """The claims as a process of a host has them."""
        self.processes.append(Process(self, host))
        return self.processes[-1]

    def pass_time(self, seconds):
        """Second by second, as processes that live renew what they hold."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for one in self.processes:
                one.renew()

    def ask(self):
        if self.away:
            raise Missing("the store does not answer")

    def held(self, name):
        lease = self.leases.get(name, Lease())
        return lease.holder is not None and self.now < lease.until


@dataclass
class Process:
    """One process. `stopped`: it renews nothing until it goes on; `dead`: it does nothing any more."""

    service: LeaseService
    host: str
    stopped: bool = False
    dead: bool = False
    claims: list = field(default_factory=list)

    def take(self, name):
        self.service.ask()
        if self.service.held(name):
            return None
        lease = self.service.leases.setdefault(name, Lease())
        claim = Held(self, name, lease.note)
        lease.holder, lease.until, lease.note = claim, self.service.now + LASTS, {"host": self.host}
        self.claims.append(claim)
        return claim

    def held(self, name):
        self.service.ask()
        return self.service.held(name)

    def renew(self):
        if not (self.stopped or self.dead or self.service.away):
            for claim in self.claims:
                claim.renew()


@dataclass
class Held:
    process: Process
    name: str
    before: dict
    lost: bool = False

    def renew(self):
        """By the service's word alone: one that ran out is had again, unless another had it meanwhile."""
        lease = self.process.service.leases[self.name]
        self.lost = lease.holder is not self
        if not self.lost:
            lease.until = self.process.service.now + LASTS

    def require(self):
        if not self.lost:
            self.process.service.ask()
            self.renew()
        if self.lost:
            raise Superseded(f"{self.name} is another's now")

    def give_back(self):
        if not self.process.dead and self in self.process.claims:
            self.process.claims.remove(self)
            if not self.lost:
                self.process.service.leases[self.name] = Lease(holder=self, until=0.0)
