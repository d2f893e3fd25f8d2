"""Loading targets, what they are given, and errors that say what is wrong."""

import sys

import pytest
import torch

import flamia
from flamia import audit
from flamia.audit import get_target, target_names

MODULE = """
import torch

def plain(q, k, v, causal):
    seen.append((q.shape, q.dtype, causal))
    return q * k.sum() * 0 + v

def wants_scale(q, k, v, *, causal, softmax_scale):
    seen.append(softmax_scale)
    return q + 0 * v * k

def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
    seen.append((cu_seqlens_q.tolist(), max_seqlen_q))
    return v * 1.0 + 0 * q * k

def wrong_shape(q, k, v, causal):
    return v[..., :1]

def wrong_lse(q, k, v, causal):
    return v, v

class Space:
    @staticmethod
    def inside(q, k, v, causal):
        return v + 0 * q * k

seen = []
number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_attention_for_audit.py").write_text(MODULE)
    (tmp_path / "my_broken_module.py").write_text("import a_module_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "my_attention_for_audit"
    sys.modules.pop("my_attention_for_audit", None)


def operands(b=2, s=5, h=2, d=4):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(b, s, h, d, generator=g).bfloat16() for _ in range(4)]


def test_a_function_of_ones_own_is_found_in_the_current_folder(module):
    target = get_target(f"{module}:plain")
    q, k, v, do = operands()
    result = target.run(q, k, v, do, causal=True)
    assert torch.equal(result.o, v)
    assert torch.equal(result.dv, do)
    assert result.lse is None
    assert sys.modules[module].seen == [(q.shape, torch.bfloat16, True)]
    assert target.promise == "confined"
    assert get_target(f"{module}:Space.inside").run(q, k, v, do).o.shape == q.shape


def test_a_scale_is_passed_to_those_that_take_one(module):
    get_target(f"{module}:wants_scale").run(*operands())
    assert sys.modules[module].seen == [0.5]


def test_a_varlen_function_gets_offsets_also_for_a_batch(module):
    result = get_target(f"{module}:packed").run(*operands(b=3, s=5))
    assert sys.modules[module].seen == [([0, 5, 10, 15], 5)]
    assert result.o.shape == (3, 5, 2, 4)
    q, k, v, do = (x[0] for x in operands())
    with pytest.raises(ValueError, match="takes no packed documents"):
        get_target(f"{module}:plain").run_packed(q, k, v, do, torch.tensor([0, 5]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mxfp9", r"'mxfp9' is unknown \(did you mean '.*mxfp8.*'\?\); allowed are mxfp8"),
        ("no_such_module_at_all:f", "module 'no_such_module_at_all' cannot be imported: ModuleNotFoundError"),
        ("my_broken_module:f", "a_module_that_is_not_there"),
        ("my_attention_for_audit:plane", "has no 'plane'; did you mean plain"),
        ("my_attention_for_audit:number", "is int, which cannot be called"),
        (":f", "write it as 'module:function'"),
        ("my_attention_for_audit:", "write it as 'module:function'"),
    ],
)
def test_what_cannot_be_loaded_is_said(module, name, message):
    with pytest.raises(ValueError, match=message):
        get_target(name)


def test_what_is_no_target_is_said():
    with pytest.raises(TypeError, match="3; it must be a name"):
        get_target(3)


def test_results_of_the_wrong_shape_are_said(module):
    with pytest.raises(ValueError, match=r"returned o \(2, 5, 2, 1\); it must be shaped as q"):
        get_target(f"{module}:wrong_shape").run(*operands())
    with pytest.raises(ValueError, match=r"returned lse \(2, 5, 2, 4\); it must be \(2, 2, 5\)"):
        get_target(f"{module}:wrong_lse").run(*operands())


def test_every_name_runs_in_both_layouts():
    q, k, v, do = (x for x in operands(b=1, s=40, h=2, d=32))
    cu = torch.tensor([0, 7, 40], dtype=torch.int32)
    for name in target_names():
        target = get_target(name)
        fixed, packed = target.run(q, k, v, do), target.run_packed(q[0], k[0], v[0], do[0], cu)
        assert fixed.o.shape == q.shape
        assert packed.dk.shape == k[0].shape
        assert torch.isfinite(fixed.dq.float()).all()
        if name != "torch-sdpa":
            assert fixed.lse.shape == (1, 40, 2, 1)
            assert packed.lse.shape == (40, 2, 1)


def test_promises_follow_the_name():
    for name in flamia.recipes():
        expected = "leaky" if name.startswith("leaky") else "exact" if name.endswith("-exact") else "output"
        assert get_target(name).promise == expected


def test_a_recipe_of_ones_own_is_a_target():
    report = audit.causality(flamia.get_recipe("mxfp8-exact"), inputs="gaussian", tokens=64, heads=1, head_dim=32)
    assert report.verdict == "exact"
