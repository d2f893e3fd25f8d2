"""MXFP8 attention written a second time: one head, one document, row by row in NumPy, rounding by ml_dtypes.

Shares no code with the package. Loops where the package vectorises, so that an indexing mistake cannot be in both.
"""

import math

import ml_dtypes
import numpy as np

TILE, BLOCK = 128, 32
LOG2E = math.log2(math.e)


def e4m3(x):
    return np.clip(np.asarray(x, np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def exponent_up(amax):
    """Smallest e with amax * 2^-e <= 448, found by trying."""
    if amax == 0:
        return -126
    e = math.frexp(amax)[1] - 12
    while amax * 2.0**-e > 448:
        e += 1
    return e


def block_operand(x, size):
    """(codes, exponents per token) of [L, D] with one exponent per ``size`` tokens."""
    codes, exponents = np.empty(x.shape), np.empty(len(x), int)
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        e = exponent_up(float(np.abs(x[part]).max()))
        codes[part], exponents[part] = e4m3(x[part] * 2.0**-e), e
    return codes, exponents


def values(operand):
    return operand[0] * np.exp2(operand[1])[:, None]


def sees(i, j, len_q, len_k, left, right):
    diagonal = i + len_k - len_q
    return (left is None or j >= diagonal - left) and (right is None or j <= diagonal + right)


def mask(len_q, len_k, left, right):
    return np.array([[sees(i, j, len_q, len_k, left, right) for j in range(len_k)] for i in range(len_q)])


def f32(x):
    return np.asarray(x, np.float32).astype(np.float64)


def forward(q, k, v, visible, scale, *, a=4, tau=4.0, row_sum="codes", per_token=False):
    """o FP32 values [Lq, D] and lse2 [Lq] from rotated q, k and v [L, D]."""
    size = 1 if per_token else BLOCK
    q_hat, k_hat = values(block_operand(q, size)), values(block_operand(k, size))
    v_codes, e_v = block_operand(v, size)
    c = float(np.float32(scale * LOG2E))
    o, lse2 = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    for i in range(len(q)):
        m, total, out = -np.inf, 0.0, np.zeros(v.shape[1])
        for k0 in range(0, len(k), TILE):
            keys = [j for j in range(k0, min(k0 + TILE, len(k))) if visible[i, j]]
            if not keys:
                continue
            x = f32(k_hat[keys] @ q_hat[i]) * c
            top = float(np.float32(x.max()))
            new = top if top - m > tau else m
            if new != m:
                out, total = f32(out * f32(np.exp2(m - new))), float(np.float32(total * f32(np.exp2(m - new))))
            m = new
            p = f32(np.exp2(x + float(np.float32(a - m))))
            rounded = np.empty(len(keys))
            counted = np.empty(len(keys))
            for n, j in enumerate(keys):
                group = [t for t in keys if t // BLOCK == j // BLOCK]
                fold = e_v[j] - max(e_v[t] for t in group) if per_token else 0
                rounded[n] = e4m3(p[n] * 2.0**fold) * 2.0**-fold
                counted[n] = rounded[n] if row_sum == "codes" and fold >= -6 else p[n]
            out = f32(out + f32(rounded @ (v_codes[keys] * np.exp2(e_v[keys])[:, None])))
            total = float(np.float32(total + np.float32(counted.sum())))
        if total > 0:
            o[i], lse2[i] = out / total, m + math.log2(total) - a
    return o, lse2


def backward(q, k, v, do, o, lse2, visible, scale, *, per_token=False, row_exponents=False, causal_scale=False):
    """dq, dk (of the rotated q and k) and dv, from the output o as it was stored."""
    size = 1 if per_token else BLOCK
    (q_codes, e_q), (k_codes, e_k) = block_operand(q, size), block_operand(k, size)
    do_codes, e_do = block_operand(do, size)
    q_hat, k_hat, v_hat = values((q_codes, e_q)), values((k_codes, e_k)), values(block_operand(v, size))
    do_hat = values((do_codes, e_do))
    c = float(np.float32(scale * LOG2E))
    len_q, len_k = visible.shape
    s = f32(q_hat @ k_hat.T) * c
    with np.errstate(invalid="ignore", over="ignore"):
        p = np.where(visible, f32(np.exp2(s - lse2[:, None])), 0.0)
    delta = (do_hat * o).sum(1)
    ds = f32(p * f32(f32(do_hat @ v_hat.T) - f32(delta)[:, None]))
    ds[~visible] = 0
    to_dq, to_dk, p_hat = np.zeros_like(ds), np.zeros_like(ds), np.zeros_like(ds)
    for i0 in range(0, len_q, BLOCK):
        rows = slice(i0, min(i0 + BLOCK, len_q))
        relative = np.exp2(e_do[rows] - e_do[rows].max())[:, None] if per_token else 1.0
        p_hat[rows] = e4m3(p[rows] * 256 * relative) / relative / 256
        relative = np.exp2(e_q[rows] - e_q[rows].max())[:, None] if per_token else 1.0
        for j0 in range(0, len_k, BLOCK):
            cols = slice(j0, min(j0 + BLOCK, len_k))
            block = ds[rows, cols] * relative
            e = exponent_up(np.abs(block).max())
            to_dk[rows, cols] = e4m3(block * 2.0**-e) * 2.0**e / relative
            if not row_exponents:
                to_dq[rows, cols] = to_dk[rows, cols]
                continue
            folded = ds[rows, cols] * (np.exp2(e_k[cols]) if per_token else 1.0)
            for i, row in enumerate(folded):
                e = exponent_up(np.abs(row).max())
                to_dq[i0 + i, cols] = e4m3(row * 2.0**-e) * 2.0**e / (np.exp2(e_k[cols]) if per_token else 1.0)
    dq = np.zeros(q.shape)
    norms, v_top, k_top = np.abs(do).sum(1), np.abs(v).max(1), np.abs(k).max(1)
    for i in range(len_q):
        last = max([j for j in range(len_k) if visible[i, j]], default=0)
        if causal_scale:
            bound = norms[i] * v_top[: last + 1].max() * k_top[: last + 1].max()
        else:
            bound = norms.max() * v_top.max() * k_top.max()
        shift = 15 - math.ceil(math.log2(bound))
        total = np.zeros(q.shape[1], np.float16)
        for k0 in range(0, len_k, TILE):
            part = f32(to_dq[i, k0 : k0 + TILE] @ k_hat[k0 : k0 + TILE])
            total = total + (part * 2.0**shift).astype(np.float16)
        dq[i] = total.astype(np.float64) * 2.0**-shift * scale
    dk, dv = to_dk.T @ q_hat * scale, p_hat.T @ do_hat
    return dq, dk, dv


def folded_forward(q, k, v, visible, scale, *, a=4, tau=4.0, per_token=False):
    """o, lse2 and M [Lq] of the folded variant."""
    size = 1 if per_token else BLOCK
    q_hat, k_hat = values(block_operand(q, size)), values(block_operand(k, size))
    v_codes, e_v = block_operand(v, size)
    c = float(np.float32(scale * LOG2E))
    o, lse2, big_m = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf), np.zeros(len(q))
    for i in range(len(q)):
        f = r = x_max = None
        total, out, top_e = 0.0, np.zeros(v.shape[1]), -1000
        for k0 in range(0, len(k), TILE):
            keys = [j for j in range(k0, min(k0 + TILE, len(k))) if visible[i, j]]
            if not keys:
                continue
            x = f32(k_hat[keys] @ q_hat[i]) * c
            z = x + e_v[keys]
            if f is None:
                f, x_max = math.ceil(float(np.float32(x.max())) * 4096) / 4096, -np.inf
            x_max, z_max = max(x_max, float(np.float32(x.max()))), float(np.float32(z.max()))
            if r is None or z_max - r > tau:
                new = float(np.float32(f + math.ceil(float(np.float32(z_max - np.float32(f))))))
                if r is not None:
                    out, total = out * 2.0 ** (r - new), total * 2.0 ** (r - new)
                r = new
            p = f32(np.exp2(x + f32(e_v[keys] + a - r)))
            codes = e4m3(p)
            top_e = max(top_e, e_v[keys].max())
            counted = np.where(e_v[keys] >= top_e - 6, codes, p) * np.exp2(-e_v[keys].astype(float))
            out = f32(out + f32(codes @ v_codes[keys]))
            total = float(np.float32(total + np.float32(counted.sum())))
        if f is not None:
            o[i], lse2[i] = out / total, r + math.log2(total) - a
            big_m[i] = f + math.ceil(float(np.float32(np.float32(x_max) - np.float32(f))))
    return o, lse2, big_m
