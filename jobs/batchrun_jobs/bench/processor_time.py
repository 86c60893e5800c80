"""How much of the machine's processors went to others while a child ran: a time is worth nothing on a busy machine."""

import resource
from dataclasses import dataclass
from pathlib import Path

# Of the machine's line: user, nice, system, idle, iowait, irq, softirq, steal. What follows is contained in these.
_NUM_KINDS = 8
_IDLE = (3, 4)
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Seconds of all processors since the machine started: of them `busy`, and those of children that have ended."""

    total: float
    busy: float
    children: float

    @classmethod
    def now(cls, ticks_a_second: int, stat: Path = _STAT) -> "ProcessorTime | None":
        """None where the system has no such file. Time that the host took from a virtual machine is busy too."""
        if not stat.exists():
            return None
        ticks = [int(number) for number in stat.read_text().split("\n", 1)[0].split()[1 : 1 + _NUM_KINDS]]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        idle = sum(ticks[kind] for kind in _IDLE)
        return cls(
            total=sum(ticks) / ticks_a_second,
            busy=(sum(ticks) - idle) / ticks_a_second,
            children=used.ru_utime + used.ru_stime,
        )

    def others_since(self, before: "ProcessorTime") -> float:
        """The share of all processors that neither idled nor worked for children, 0 to 1."""
        others = (self.busy - before.busy) - (self.children - before.children)
        return max(0.0, others) / max(self.total - before.total, 1e-9)
