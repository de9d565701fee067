"""The simulated driver and its machine. Imports vcuda.spec only; shares no code with the interposer."""

from vcuda.sim.cards import (
    DEFAULT_MODEL,
    H100_TIMING,
    MODELS,
    SECOND_TIMING,
    Card,
    CardModel,
    MigInstance,
    SimCard,
)
from vcuda.sim.errors import SimError
from vcuda.sim.faults import (
    AllocationError,
    CardLost,
    CardRecovered,
    Cleared,
    Fault,
    LaunchFault,
    SlowCall,
    Xid,
)
from vcuda.sim.machine import CONTAINER_DIRECTORY, Machine, Mount
from vcuda.sim.report import CardReport, ProcessOnCard, ProcessReport, Report

__all__ = [
    "CONTAINER_DIRECTORY",
    "DEFAULT_MODEL",
    "H100_TIMING",
    "MODELS",
    "SECOND_TIMING",
    "AllocationError",
    "Card",
    "CardLost",
    "CardModel",
    "CardRecovered",
    "CardReport",
    "Cleared",
    "Fault",
    "LaunchFault",
    "Machine",
    "MigInstance",
    "Mount",
    "ProcessOnCard",
    "ProcessReport",
    "Report",
    "SimCard",
    "SimError",
    "SlowCall",
    "Xid",
]
