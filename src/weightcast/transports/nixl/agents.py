"""An agent that is made when it is first needed, and kept."""

from __future__ import annotations

import threading

from weightcast.transports.nixl.agent import Agent
from weightcast.transports.nixl.leaving import outlive


class Agents:
    """Gives everybody the same agent, until it is dropped: then the next call makes another one. Any thread may call."""

    def __init__(self, *, nic: str = "", polled: bool = False) -> None:
        self._nic, self._polled = nic, polled
        self._lock = threading.Lock()
        self._agent: Agent | None = None

    def get(self) -> Agent:
        """The agent. In a child of a fork it is one of the child's own."""
        with self._lock:
            if self._agent is not None and not self._agent.usable:
                outlive(self._agent)  # the parent's: taking it down here would disconnect the parent
                self._agent = None
            if self._agent is None:
                self._agent = Agent(nic=self._nic, polled=self._polled)
            return self._agent

    @property
    def made(self) -> Agent | None:
        """The agent if there is one."""
        with self._lock:
            return self._agent

    def drop(self, agent: Agent) -> None:
        """Do not give this one out any more. Closing it is up to the caller."""
        with self._lock:
            if self._agent is agent:
                self._agent = None

    def close(self) -> None:
        """Close the agent. No read of it may be moving."""
        with self._lock:
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()
