"""Small launches before the Hopper kernels: which documents need the careful forward, and numbers of NVFP4 codes.

Twins: ``bounds.uneven_documents``, ``quantize.reference.dequantize``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flamia.bounds import FOLD_RANGE
from flamia.documents import TOKEN_BLOCK
from flamia.launch import cdiv, head_grid, launch
from flamia.quantize.payloads import NVFP4Rows

_DOCUMENTS, _WIDTH = 8, 256  # a program compares so many exponents of so many documents at a time
_WORDS = 1024  # words of eight codes that a program decodes, of one head of several tokens


def uneven_documents(
    exponents: Tensor, cu_seqlens: Tensor, count: Tensor, *, per_token: bool = False
) -> tuple[Tensor, Tensor]:
    """Documents that the careful kernel has to do, and how many items it has to look at.

    exponents: V's, UE8M0 [kv heads, Tk], equal over 32 tokens of a document unless per_token. cu_seqlens: int32
    [documents + 1]. count: int32 [1], items of the work list.

    Returns:
        uint8 [kv heads, documents]: 1 where exponents vary by more than ``FOLD_RANGE``; int32 [1]: ``count`` if there
        is such a document, else 0.
    """
    heads, total = exponents.shape
    documents = cu_seqlens.shape[0] - 1
    flags = torch.empty((heads, documents), dtype=torch.uint8, device=exponents.device)
    careful = torch.zeros(1, dtype=torch.int32, device=exponents.device)
    if heads and documents:
        launch(
            "flamia.sm90.triton_launches:_uneven_kernel",
            (cdiv(documents, _DOCUMENTS), heads),
            (exponents, cu_seqlens, count, flags, careful, total, documents),
            warps=4,
            exact=False,
            LIMIT=FOLD_RANGE,
            STEP=1 if per_token else TOKEN_BLOCK,
            DOCUMENTS=_DOCUMENTS,
            WIDTH=_WIDTH,
        )
    return flags, careful


def decode_nvfp4(payload: NVFP4Rows, *, finite: bool = False) -> Tensor:
    """The numbers that codes and scales stand for, BF16 [T, N, D]: exact, since they have six significant bits.

    A scale of NaN makes its 16 numbers NaN, or, with ``finite``, zero: as E4M3 codes of such tokens are, for a product
    whose tiles reach into the next document and whose NaNs come from elsewhere. The payload may be some heads of one.
    """
    total, heads, half = payload.codes.shape
    out = torch.empty((total, heads, 2 * half), dtype=torch.bfloat16, device=payload.codes.device)
    if total and heads:
        tokens = 4 * _WORDS // half
        words = payload.codes.view(torch.int32)
        launch(
            "flamia.sm90.triton_launches:_decode_kernel",
            head_grid(cdiv(total, tokens), heads),
            (words, words.stride(0), payload.scales, payload.scales.stride(0), out.view(torch.int32), total, heads),
            warps=4,
            exact=False,
            FINITE=finite,
            D=2 * half,
            TOKENS=tokens,
        )
    return out
