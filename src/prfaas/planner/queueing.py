"""Waiting in front of k equal servers: Poisson arrivals, any service time, first come first served.

No closed form exists for M/G/k; these are the standard approximations, accurate to a few per cent
where service times vary less than exponentially, as prefills do (a test compares them with an
event simulation):

    mean wait      Kimura (1986), between M/M/k (exact) and M/D/k (Cosmetatos 1976)
    P(wait > 0)    Erlang C
    wait | wait    gamma with the variance of the M/G/1 queue with service S / k, because a busy
                   M/G/k queue behaves like that one
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import gammaincc

from prfaas.planner.workload import weighted_sum

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Service:
    """First three moments of a service time."""

    mean_s: float
    second_s2: float
    third_s3: float

    @classmethod
    def of(cls, seconds: Array, weight: Array) -> Service:
        share = weight / weight.sum()
        squared = seconds * seconds
        return cls(*(weighted_sum(power, share) for power in (seconds, squared, squared * seconds)))

    @classmethod
    def from_cv2(cls, mean_s: float, cv2: float) -> Service:
        """A gamma service time, where only mean and variance are known."""
        second = mean_s**2 * (1 + cv2)
        return cls(mean_s, second, second * mean_s * (1 + 2 * cv2))

    @property
    def cv2(self) -> float:
        return max(0.0, self.second_s2 / self.mean_s**2 - 1)


@dataclass(frozen=True, slots=True)
class Wait:
    """The stationary wait: zero with probability 1 - p_wait, else gamma(shape, scale)."""

    p_wait: float
    shape: float
    scale_s: float

    @property
    def mean_s(self) -> float:
        return self.p_wait * self.shape * self.scale_s

    def exceeds(self, seconds: Array) -> Array:
        """P(wait > seconds)."""
        if self.p_wait == 0:
            return np.zeros(np.shape(seconds))
        return np.asarray(self.p_wait * gammaincc(self.shape, seconds / self.scale_s))


NO_WAIT = Wait(0.0, 1.0, 1.0)


def erlang_c(servers: int, offered: float) -> float:
    """P(wait > 0) in M/M/k with `offered` erlangs of work; 1 where there is no steady state."""
    if offered >= servers:
        return 1.0
    blocked = 1.0  # Erlang B by its recursion, stable for thousands of servers
    for n in range(1, servers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))


def mean_wait_s(arrival_rps: float, servers: int, service: Service) -> float:
    """The mean wait. Infinite where work arrives faster than the servers can do it."""
    load = arrival_rps * service.mean_s / servers
    if load >= 1:
        return math.inf
    if arrival_rps == 0:
        return 0.0
    markov = erlang_c(servers, load * servers) * service.mean_s / (servers * (1 - load))
    constant = (
        0.5
        * markov
        * (
            1
            + (1 - load) * (servers - 1) * (math.sqrt(4 + 5 * servers) - 2) / (16 * load * servers)
        )
    )
    if markov == 0:
        return 0.0
    cv2 = service.cv2
    if cv2 > 1:
        # Here Kimura's weights turn negative; Allen and Cunneen's do not.
        return markov * (1 + cv2) / 2
    return (1 + cv2) / (2 * cv2 / markov + (1 - cv2) / constant)


def predict_wait(arrival_rps: float, servers: int, service: Service) -> Wait | None:
    """The distribution of the wait; None where there is no steady state."""
    load = arrival_rps * service.mean_s / servers
    if load >= 1:
        return None
    p_wait = erlang_c(servers, load * servers)
    mean = mean_wait_s(arrival_rps, servers, service)
    if p_wait < 1e-12 or mean < 1e-12:
        return NO_WAIT
    # In M/G/1 with service S / k, a wait that is not zero is a geometric number of residual
    # services R:  E[V] = E[R] / (1 - rho),  E[V^2] = E[R^2] / (1 - rho) + 2 rho E[V]^2.
    residual = service.second_s2 / (2 * service.mean_s) / servers
    residual2 = service.third_s3 / (3 * service.mean_s) / servers**2
    first = residual / (1 - load)
    second = residual2 / (1 - load) + 2 * load * first**2
    spread = max(second / first**2 - 1, 1e-6)  # squared coefficient of variation
    shape = 1 / spread
    return Wait(p_wait, shape, mean / p_wait / shape)
