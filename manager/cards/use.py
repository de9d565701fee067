"""What the cards do now, by a driver that may be gone."""

from __future__ import annotations

from manager.cards.driver import CardProcess, CardSample, Driver, DriverError, ProcessUtilization


class CardUse:
    """Asks the driver of the moment; one that fails does not say."""

    _driver: Driver

    def sample(self, uuid: str) -> CardSample | None:
        try:
            return self._driver.sample(uuid)
        except DriverError:
            return None

    def processes(self, uuid: str) -> tuple[CardProcess, ...] | None:
        try:
            return self._driver.processes(uuid)
        except DriverError:
            return None

    def utilization(self, uuid: str, since_us: int) -> tuple[ProcessUtilization, ...] | None:
        try:
            return self._driver.utilization(uuid, since_us)
        except DriverError:
            return None
