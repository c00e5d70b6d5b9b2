"""What tests of attention kernels share: an oracle, a problem made from a case, and tolerances.

The oracle is per-row dense attention in numpy float64: too simple to be wrong. It knows no blocks.
"""

import numpy as np


def dense_attention(
    q_QNH: np.ndarray,
    k_PKH: np.ndarray,
    v_PKH: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: np.ndarray | None = None,
) -> np.ndarray:
    """Causal attention of the last Q of P tokens of one request over all P, in float64."""
    q_QNH, k_PKH, v_PKH = (np.asarray(x, np.float64) for x in (q_QNH, k_PKH, v_PKH))
    (Q, N, H), (P, K, _) = q_QNH.shape, k_PKH.shape
    k_PNH, v_PNH = (np.repeat(x, N // K, axis=1) for x in (k_PKH, v_PKH))
    score_NQP = scale * np.einsum("QNH,PNH->NQP", q_QNH, k_PNH)
    if soft_cap is not None:
        score_NQP = soft_cap * np.tanh(score_NQP / soft_cap)
    distance_QP = np.arange(P - Q, P)[:, None] - np.arange(P)
    visible_QP = (distance_QP >= 0) & (distance_QP < (window or P))
    weight_NQP = np.where(visible_QP, np.exp(score_NQP), 0)
    sink_N11 = 0 if sinks_N is None else np.exp(np.asarray(sinks_N, np.float64))[:, None, None]
    weight_NQP /= weight_NQP.sum(-1, keepdims=True) + sink_N11
    return np.einsum("NQP,PNH->QNH", weight_NQP, v_PNH)
