"""Equations 1 to 8 of the paper, one function each, in its notation (Table 4).

Every argument may be a number or a numpy array. Units are seconds, bytes, bits per second and
requests per second. A stage that no request passes has infinite headroom, not zero: a division by a
share of 0 gives infinity, as the limit does.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Quantity: TypeAlias = float | npt.NDArray[np.float64]


def eq1_kv_throughput_bps(kv_bytes: Quantity, t_prefill_s: Quantity) -> Quantity:
    """Phi_kv(l) = S_kv(l) / T_prefill(l): the rate at which one instance produces KV."""
    return kv_bytes * 8 / t_prefill_s


def eq2_min_egress_bps(gpus: int, gpus_per_instance: int, phi_kv_bps: Quantity) -> Quantity:
    """B_out = N / P * Phi_kv(L_avg): the rate at which a cluster of N GPUs must be able to send."""
    return gpus / gpus_per_instance * phi_kv_bps


def eq3_theta_prfaas(
    n_prfaas: int, t_prefill_long_s: Quantity, b_out_bps: float, kv_bytes_long: Quantity
) -> Quantity:
    """min(N_prfaas / T_prefill(l_long), B_out / S_kv(l_long)): the slower of compute and egress."""
    return np.minimum(n_prfaas / t_prefill_long_s, b_out_bps / (kv_bytes_long * 8))


def eq4_theta_pd_p(n_p: int, t_prefill_short_s: Quantity) -> Quantity:
    """N_p / T_prefill(l_short): local prefill. The network within a cluster is never the limit."""
    return n_p / t_prefill_short_s


def eq5_theta_pd_d(n_d: int, bs_max: int, t_decode_s: float, l_out: float) -> float:
    """N_d * BS_max / (T_decode * L_out): decode at the largest batch that the SLO allows."""
    return n_d * bs_max / (t_decode_s * l_out)


def eq6_lambda_max(
    theta_prfaas: Quantity, theta_pd_p: Quantity, theta_pd_d: Quantity, p: Quantity
) -> Quantity:
    """min(Theta_prfaas / p, Theta_pd-p / (1 - p), Theta_pd-d): the slowest stage, given the split
    of traffic."""
    return np.minimum(
        np.minimum(per_share(theta_prfaas, p), per_share(theta_pd_p, 1 - p)), theta_pd_d
    )


def eq7_threshold_imbalance(theta_prfaas: float, theta_pd_p: float, p: float) -> float:
    """(Theta_prfaas / p) / (Theta_pd-p / (1 - p)) - 1; zero where eq. 7 holds."""
    return float(per_share(theta_prfaas, p) / per_share(theta_pd_p, 1 - p) - 1)


def eq8_split_imbalance(theta_prfaas: float, theta_pd_p: float, theta_pd_d: float) -> float:
    """(Theta_prfaas + Theta_pd-p) / Theta_pd-d - 1; zero where eq. 8 holds, negative where decode
    has slack."""
    return (theta_prfaas + theta_pd_p) / theta_pd_d - 1


def per_share(theta: Quantity, share: Quantity) -> Quantity:
    """The arrival rate that saturates a stage which serves `share` of the requests."""
    theta, share = np.broadcast_arrays(np.asarray(theta, float), np.asarray(share, float))
    quotient = np.full(theta.shape, np.inf)
    np.divide(theta, share, out=quotient, where=share > 0)
    return quotient
